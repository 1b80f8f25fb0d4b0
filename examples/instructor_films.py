"""Items in Instructor: a response model with fields out of a set, and their keys.

With `pip install instructor`, and a server that has the set "films":
python examples/instructor_films.py http://localhost:8000/v1
"""

from __future__ import annotations

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

from itemset.client import Item, read

Film = Item["films"]
URL = sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8000/v1"


class Tip(BaseModel):
    film: Film


openai = OpenAI(base_url=URL, api_key="none")
client = instructor.from_openai(openai, mode=instructor.Mode.JSON_SCHEMA)
tip, completion = client.chat.completions.create_with_completion(
    model=openai.models.list().data[0].id,
    messages=[{"role": "user", "content": "Which film for a rainy Sunday?"}],
    response_model=Tip,
    max_tokens=128,
)
print("field:", tip.film.text)
film = read(Tip, completion.choices[0]).film  # the server's own words say its key, too
print(film.key, film.text)
