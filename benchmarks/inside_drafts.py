"""Steps that speculation saves of JSON answers with items in them: n-grams alone, and what the set forces as well.

python benchmarks/inside_drafts.py --json docs/benchmarks/inside_drafts.json

The demo's model and film titles in vLLM's model runner V1, at temperature 0. A count, the same on every machine.
"""

from __future__ import annotations

import json
from typing import Any

from inside import SHAPES
from runner import Report, Row, environment_of, isolated, parser

PROMPT, DRAFTS = "User {}: recommend films, one for each evening, as JSON.\n", 7


def measure(shape: str, drafts: str, answers: int) -> Row:
    from films_data import model_dir, titles
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given: Row = {"item_sets": {"films": f"{titles()}?column=title"}, "forced_drafts": drafts == "forced"}
    speculative = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}
    llm = LLM(
        str(model_dir()), dtype="float32", max_model_len=512, max_num_seqs=16, enforce_eager=True,
        structured_outputs_config={"backend": "static", "disable_any_whitespace": True}, additional_config=given,
        speculative_config=None if drafts == "none" else speculative, disable_log_stats=False,
    )  # fmt: skip
    schema = StructuredOutputsParams(json=json.dumps(SHAPES[shape]))
    params = SamplingParams(temperature=0, max_tokens=200, structured_outputs=schema)
    outputs: Any = llm.generate([PROMPT.format(i) for i in range(answers)], params, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    counted = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafted, accepted = (counted.get(f"vllm:spec_decode_num_{name}_tokens", 0) for name in ("draft", "accepted"))
    row = {"tokens an answer": tokens / answers, "steps an answer": (tokens - accepted) / answers}
    return row | {"accepted of drafted": accepted / drafted if drafted else None}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--answers", type=int, default=32)
    arguments, rows = options.parse_args(), list[Row]()
    for shape in SHAPES:
        for drafts in ("none", "ngram", "forced"):
            row = isolated(measure, shape, drafts, arguments.answers, env=environment_of("vllm-v1"))
            rows.append({"shape": shape, "drafts": drafts, **row})
            print(rows[-1], flush=True)
    Report(arguments).add("steps", rows)


if __name__ == "__main__":
    main()
