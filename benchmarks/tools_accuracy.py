"""How often SmolLM2-135M names the right one of BFCL's 1,853 functions, with the set of their names and without.

python benchmarks/tools_accuracy.py --folder DIR --json docs/benchmarks/tools_accuracy.json

pip fetches bfcl-eval, with questions and answers, into --folder, which keeps it. Asked are --questions of each category
that wants one call; the prompt begins with the calls of four other questions.

calls: an answer is one line of JSON with a name, greedy, in vLLM's model runner V1 without a GPU. The prompt has the
question alone, or the question's own functions, too. The set is none, all names, or these functions alone
(`only_keys`). "Unknown" answers name a function that does not exist, "no call" ones name none.
lists: whether the right function is among the first of a ranked list of 100 beams, for --lists questions. The items are
names, or names with descriptions. The prompt's first tokens are cut so that it fills blocks of vLLM's prefix cache.
"""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from statistics import mean

import runner
from public_lists import LISTS, fetched, rows_of, source_of
from runner import Report, Row, isolated, parser

CATEGORIES = ("simple_python", "multiple", "live_simple", "live_multiple")
LONGEST = 600  # characters of a question
PLACES, BLOCK = (1, 10, 100), 32  # tokens of a block


def questions(folder: Path, count: int) -> list[Row]:
    """Of each category the same random questions: text, right function, and their own functions, which BFCL gives."""
    data, found = fetched(LISTS["functions"].package, folder) / "bfcl_eval/data", list[Row]()
    for category in CATEGORIES:
        file = f"BFCL_v4_{category}.json"
        files = (data / file, data / "possible_answer" / file)
        asked, answers = ([json.loads(line) for line in path.open()] for path in files)
        rows = [
            {"text": one["question"][0][-1]["content"], "right": next(iter(answer["ground_truth"][0])),
             "own": [function["name"] for function in one["function"]]}
            for one, answer in zip(asked, answers, strict=True)
        ]  # fmt: skip
        found += random.Random(0).sample([row for row in rows if len(row["text"]) <= LONGEST], count)
    return found


def prompt_of(asked: list[Row], own: bool, call: str) -> str:
    """Questions with their calls; the last has none yet."""
    parts = []
    for one in asked:
        known = f"Functions: {', '.join(one['own'])}\n" if own else ""
        parts.append(f"Question: {one['text']}\n{known}Call:\n{call % one['right']}")
    return "\n\n".join(parts)[: -len(call % asked[-1]["right"])]


class Asked:
    """The model with both sets, its questions, and the calls that its prompts begin with."""

    def __init__(self, folder: Path, count: int) -> None:
        from films_data import model_dir
        from vllm import LLM

        source = source_of("functions", folder)
        rows = rows_of(source)
        self._names = [row["name"] for row in rows]
        texts = (" ".join(f"{row['name']}: {row['description']}".split()) for row in rows)
        (described := source.with_name("described.txt")).write_text("\n".join(texts))
        sets = {"names": f"{source}?column=name&key=name", "names, descriptions": str(described)}
        given: Row = {"structured_outputs_config": {"backend": "static", "disable_any_whitespace": True}}
        given |= {"additional_config": {"item_sets": sets}, "enforce_eager": True, "dtype": "float32"}
        given |= {"max_model_len": 2_048, "kv_cache_memory_bytes": 2 << 30, "block_size": BLOCK}
        self._llm = LLM(str(model_dir()), **given)
        drawn = questions(folder, count + 1)
        self._shots = drawn[count :: count + 1]
        self._asked = [one for at, one in enumerate(drawn) if at % (count + 1) < count]

    def _prompts(self, some: list[Row], own: bool, call: str) -> list[str]:
        return [prompt_of([*self._shots, one], own, call) for one in some]

    def calls(self, own: bool, allowed: str) -> Row:
        """What becomes of all questions. own: their functions are in the prompt. allowed: none, all, or own."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        def constraint(one: Row) -> StructuredOutputsParams | None:
            field = {"type": "string", "item_set": "names"} | ({"only_keys": one["own"]} if allowed == "own" else {})
            schema: Row = {"type": "object", "properties": {"name": field}, "required": ["name"]}
            schema["additionalProperties"] = False
            return StructuredOutputsParams(json=schema) if allowed != "none" else None

        words: Row = {"max_tokens": 64, "temperature": 0, "stop": ["\n"]}
        params = [SamplingParams(structured_outputs=constraint(one), **words) for one in self._asked]
        outputs = self._llm.generate(self._prompts(self._asked, own, '{"name":"%s"}'), params, use_tqdm=False)
        found = [re.match(r'\{"name": ?"([^"]*)"', output.outputs[0].text) for output in outputs]
        named = [match and match[1] for match in found]
        outcomes = {
            "right, %": [name == one["right"] for name, one in zip(named, self._asked, strict=True)],
            "unknown, %": [name is not None and name not in self._names for name in named],
            "no call, %": [name is None for name in named],
        }
        return {what: 100.0 * mean(of) for what, of in outcomes.items()}

    def recalls(self, items: str, count: int) -> Row:
        """Of some questions of each category, the share whose function is among the first of a list."""
        from vllm_static.front.list_requests import RankingParams

        some, asking = self._asked[:: max(1, len(self._asked) // count)], []
        for text in self._prompts(some, False, "%s"):
            ids = self._llm.get_tokenizer().encode(text, add_special_tokens=False)
            asking.append({"prompt_token_ids": ids[len(ids) % BLOCK :]})
        params = RankingParams(beam_width=PLACES[-1], max_tokens=128, item_set=items)
        found = [[best.keys for best in output.sequences] for output in self._llm.beam_search(asking, params)]
        rights = [one["right"] if items == "names" else self._names.index(one["right"]) for one in some]
        where = [[right in keys for keys in best] for right, best in zip(rights, found, strict=True)]
        return {"questions": len(some)} | {f"@{n}, %": 100.0 * mean(any(one[:n]) for one in where) for n in PLACES}


def measured(folder: str, count: int, lists: int) -> list[list[Row]]:
    """Both tables' rows."""
    asked = Asked(Path(folder), count)
    calls: list[Row] = [
        {"prompt": about, "set": allowed} | asked.calls(own, allowed)
        for own, about in ((False, "question"), (True, "question, own functions"))
        for allowed in ("none", "all", "own")
    ]
    sets = ("names", "names, descriptions")
    return [calls, [{"items": items} | asked.recalls(items, lists) for items in sets]]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--folder", type=Path, required=True, help="where packages are kept")
    options.add_argument("--questions", type=int, default=50, help="of each of the four categories")
    options.add_argument("--lists", type=int, default=24, help="how many questions are asked for lists, too")
    arguments = options.parse_args()
    report, folder = Report(arguments), arguments.folder.resolve()
    env = runner.environment_of("vllm-v1") | {"OMP_NUM_THREADS": "2"}
    calls, lists = isolated(measured, str(folder), arguments.questions, arguments.lists, env=env)
    size = len(rows_of(source_of("functions", folder)))
    own = 100.0 * mean(1 / len(one["own"]) for one in questions(folder, arguments.questions))
    chance = (
        {"prompt": "chance", "set": name, "right, %": share} for name, share in (("all", 100 / size), ("own", own))
    )
    report.add("calls", [*calls, *chance])
    report.add("lists", [*lists, {"items": "chance"} | {f"@{n}, %": 100 * n / size for n in PLACES}])


if __name__ == "__main__":
    main()
