"""Items in LangChain: a field of structured output, and a retriever whose documents are a ranked list.

With `pip install langchain-openai`, and a server that has the set "films":
python examples/langchain_films.py http://localhost:8000/v1
"""

from __future__ import annotations

import sys
from typing import Any

from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel

from itemset.client import Item, rank

Film = Item["films"]
URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"
QUESTION = "Which film for a rainy Sunday?"


class Tip(BaseModel):
    film: Film


class Films(BaseRetriever):
    """The best films for a query by the model's own probabilities."""

    client: Any
    n: int = 3

    def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
        items = rank(self.client, "films", query, n=self.n)
        return [Document(item.text, metadata={"key": item.key, "score": item.score}) for item in items]


client = OpenAI(base_url=URL, api_key="none")
chat = ChatOpenAI(model=client.models.list().data[0].id, base_url=URL, api_key="none", max_tokens=128)
tip = chat.with_structured_output(Tip, method="json_schema").invoke(QUESTION)
print("field:", tip.film.text)
for document in Films(client=client).invoke(QUESTION):
    print(document.metadata["key"], document.page_content)
