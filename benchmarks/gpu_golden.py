"""Golden files: what the kernels in Numba give for random requests and searches, held against Triton's on a device.

python benchmarks/gpu_golden.py record FILE    on any machine: run them, and write each call with its result; a tenth of
                                               them with the further word `few`
python benchmarks/gpu_golden.py compile FILE   the same calls in Triton without a device, and those of an engine's start

A call is a kernel's function, what it was given and what it made. Logits of masks are not kept: they are `pattern`.
"""

from __future__ import annotations

import lzma
import random
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Call = dict[str, Any]
Emit = Callable[[dict[str, Any]], None]
VOCABULARIES = ((48, 24), (5_000, 5), (70_000, 2))  # tokens, and steps: one launch, two, labels of 32 bits
FEW = ((48, 4), (5_000, 1))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NEAR = 1e-5  # what two orders of adding may differ by, relatively: sums of exponentials in float32
ENGINE_VOCABULARY = 151_936


def pattern(rows: int, vocabulary: int, dtype: torch.dtype, device: Any, *, aligned: bool = True) -> Tensor:
    """Logits that every machine makes alike. aligned: whether rows begin at multiples of 16 bytes."""
    width = -(-vocabulary // 64) * 64
    logits = torch.empty(rows, width + (0 if aligned else 1), dtype=dtype, device=device)
    logits = logits[:, :vocabulary] if aligned else logits[:, 1 : vocabulary + 1]
    values = torch.arange(rows * vocabulary, device=device).mul_(7_919).remainder_(251).view(rows, vocabulary)
    return logits.copy_(values - 125)


def record(path: Path, few: bool = False) -> None:
    calls = _shared([*_masks(FEW if few else VOCABULARIES), *_lists(1 if few else 3), *_own_attention()], {})
    save(calls, path)
    print(f"{len(calls)} calls, {path.stat().st_size / 1e6:.1f} MB")


def save(calls: list[Call], path: Path) -> None:
    with lzma.open(path, "wb", preset=6) as packed:
        torch.save(calls, packed)


def load(path: Path) -> list[Call]:
    with lzma.open(path) as packed:
        calls: list[Call] = torch.load(BytesIO(packed.read()), weights_only=False)
    return calls


def _shared(value: Any, known: dict[Any, Tensor]) -> Any:
    """Let equal tensors be one, which a file then holds once."""
    if isinstance(value, Tensor):
        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return known.setdefault((value.dtype, value.shape, content), value.contiguous())
    if isinstance(value, dict):
        return {name: _shared(one, known) for name, one in value.items()}
    if isinstance(value, list | tuple):
        parts = [_shared(part, known) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value


def _masks(vocabularies: tuple[tuple[int, int], ...]) -> Iterator[Call]:
    import schedule
    from gpu_peers import constants

    from itemset.masking import cpu_kernels
    from itemset.masking.slots import Slots

    calls: list[Call] = []

    class Recording(Slots):
        def step(self, batch: Any, logits: Tensor) -> None:
            arena, marks, rows = self.arena, self.marks, batch.rows
            read = (arena.words.clone(), arena.sets.clone())
            shape = {"rows": rows, "vocabulary": logits.shape[1]}

            def call(name: str, *args: Any, out: int, **more: Any) -> Tensor:
                given = copied(args)
                getattr(cpu_kernels, name)(arena, *args)
                calls.append(
                    {"of": "masking", "name": name, "arena": read, "given": given, "made": copied(args), **more}
                )
                made: Tensor = args[out]
                return made

            states = call("walk", self.cells.clone(), marks, batch, torch.empty(rows, dtype=torch.int64), out=3)
            ones = torch.zeros(rows, shape["vocabulary"])
            every = (ones.clone(), states, marks, batch.slots, batch.rows_each)
            masked = call("mask", *every, out=0, logits=0, **shape)
            again = (self.cells.clone(), marks, batch, torch.empty(rows, dtype=torch.int64), ones)
            call("walk", *again, out=4, logits=4, **shape)
            if batch.rows_each is None:
                for guess in (False, True):
                    drafts = torch.full((rows, 5), -7, dtype=torch.int32)
                    call("forced", states, marks, batch.slots, drafts, guess, out=3)
                of_rows = marks[batch.slots.long()].contiguous()
                call("advance", states, masked.argmax(1), of_rows, torch.empty(rows, dtype=torch.int64), out=3)
                call("advance", states, batch.tokens, of_rows, torch.empty(rows, dtype=torch.int64), out=3)
            super().step(batch, logits)

    for vocabulary, steps in vocabularies:
        with constants(schedule, VOCABULARY=vocabulary, PADDED=vocabulary + 5):
            for number, options in enumerate(({}, {"window": True}, {"each": True, "positions": True})):
                engine = schedule.Schedule(vocabulary + number, kernels="numba", device="cpu", **options)
                shape = {"max_rows": schedule.MOST_ROWS, "max_stop_tokens": schedule.STOPS}
                engine.slots = Recording(engine.arena, schedule.SLOTS, **shape)
                engine.run(steps)
    for call in calls:
        if (at := call.get("logits")) is not None:  # which columns stay
            stay = call["made"][at].isfinite()
            call["stay"], call["made"], call["given"] = (
                _packed(stay),
                without(call["made"], at),
                without(call["given"], at),
            )
        yield call


def _lists(seeds: int) -> Iterator[Call]:
    import compared_lists

    calls: list[Call] = []

    class Recording(compared_lists.Compared):
        def both(self, name: str, now: Any, *args: Any) -> tuple[Any, Any]:
            expected = getattr(compared_lists.cpu_kernels, name)(now, *args)
            given = copied((now._replace(arena=None), *args))
            read = (now.arena.words, now.arena.sets)
            calls.append({"of": "ranking", "name": name, "arena": read, "given": given, "made": copied(expected)})
            return expected, expected

    compared_lists.Compared = Recording  # type: ignore[misc]
    draw = random.Random(0)
    kinds = ({}, {"renormalised": True}, {"stepwise": True}, {"lockstep": True}, {"races": True})
    for seed in range(seeds):
        for options in kinds:
            vocabulary = draw.choice([60, 300])
            sets = [
                [
                    [draw.randrange(vocabulary if i == 0 else 20) for i in range(draw.randint(*length))]
                    for _ in range(150)
                ]
                for length in [(1, 3), (2, 9), (4, 4)]
            ]
            end = vocabulary - 1 if "races" in options else draw.choice([None, vocabulary - 1])
            compared_lists.compared(
                sets, "cpu", seed=seed, vocabulary=vocabulary, padding=seed % 3, dtype=DTYPES[seed % 3],
                width=draw.randint(1, 24), k=draw.randint(1, 24), end_token=end, **options,
            )  # fmt: skip
    yield from calls


def _own_attention() -> Iterator[Call]:
    """Beams' attention over their own tokens, against a softmax in float64."""
    generator, heads, kv_heads, size, known = torch.Generator().manual_seed(0), 16, 8, 128, 3

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    for more in (1, 2, 5):
        rows, tokens = 6, 6 * more
        over_prompts, sums = draw(tokens, heads, size), torch.randn(heads, tokens, generator=generator)
        query, new, own = (
            draw(tokens, heads, size),
            [draw(tokens, kv_heads, size) for _ in "kv"],
            draw(60, kv_heads, 2 * size),
        )
        ancestors = torch.randint(0, 50, (rows, known), generator=generator)
        entries, scale = torch.arange(50, 50 + rows), size**-0.5
        keys, values = (
            torch.cat((own[ancestors][..., part], one.view(rows, more, kv_heads, size)), 1).double()
            for part, one in zip((slice(0, size), slice(size, None)), new, strict=True)
        )
        asked = query.view(rows, more, kv_heads, heads // kv_heads, size).double()
        scores = torch.einsum("rmhgd,rkhd->rmhgk", asked, keys) * scale
        order = torch.arange(known + more)
        scores = scores.masked_fill((order > order[known:, None])[:, None, None], -torch.inf)
        every = torch.einsum("rmhgk,rkhd->rmhgd", scores.softmax(-1), values).reshape(tokens, heads, size)
        weight = torch.sigmoid(scores.logsumexp(-1).view(tokens, heads, 1) - sums.t()[:, :, None])
        kept = own.clone()
        kept[entries] = torch.cat([one.view(rows, more, kv_heads, size)[:, 0] for one in new], -1)
        made = (over_prompts.double().lerp(every, weight).bfloat16(), kept)
        given = (over_prompts, sums, query, tuple(new), own, entries, ancestors, scale, 0.0)
        yield {"of": "attention", "name": "add_own", "given": given, "made": made}


def copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, tuple):
        parts = [copied(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def moved(value: Any, device: str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, copy=True)
    if isinstance(value, tuple):
        parts = [moved(part, device) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def without(args: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    return (*args[:at], None, *args[at + 1 :])


def _packed(stay: Tensor) -> Tensor:
    import numpy as np

    return torch.from_numpy(np.packbits(stay.numpy(), axis=1))


def _unpacked(call: Call) -> Tensor:
    import numpy as np

    bits = np.unpackbits(call["stay"].numpy(), axis=1, count=call["vocabulary"])
    return torch.from_numpy(bits).bool()


def run(
    call: Call, device: str, *, dtype: torch.dtype, aligned: bool
) -> tuple[Callable[[], Any], tuple[Any, ...], Any]:
    """What runs a call in Triton, its arguments, and what it must make of them: (tensors compared, expected)."""
    given, made = moved(call["given"], device), moved(call["made"], device)
    if (at := call.get("logits")) is not None:
        logits = pattern(call["rows"], call["vocabulary"], dtype, device, aligned=aligned)
        given = (*given[:at], logits, *given[at + 1 :])
        expected = logits.masked_fill(~_unpacked(call).to(device), -torch.inf)
        made = (*made[:at], expected, *made[at + 1 :])
    if call["of"] == "attention":
        from vllm_static.worker.triton_attention import add_own

        return (lambda: add_own(*given)), given, made
    words, sets = moved(call["arena"], device)
    arena = SimpleNamespace(words=words, sets=sets)
    if call["of"] == "masking":
        from itemset.masking import triton_kernels as masking

        function = getattr(masking, call["name"])
        return (lambda: function(arena, *given)), given, made
    from itemset.ranking import triton_kernels as ranking

    now, *rest = given
    function = getattr(ranking, call["name"])
    return (lambda: function(now._replace(arena=arena), *rest)), given, made


def compare(call: Call, result: Any, given: tuple[Any, ...], made: Any) -> tuple[int, float]:
    """How many numbers differ from the golden ones, and the largest relative difference of floating ones."""
    if call["of"] == "ranking":
        found, wanted = result, made
    elif call["of"] == "attention":
        found, wanted = (given[0], given[4]), made
    else:
        found, wanted = given, made
        if call["name"] == "walk":  # the last cell is nobody's
            found, wanted = (found[0][:-1], *found[1:]), (wanted[0][:-1], *wanted[1:])
    pairs = list(zip(_tensors(found), _tensors(wanted), strict=True))
    if call["name"] == "ended":  # the earliest time is of beams that lead on, and of races
        from itemset.ranking.beam_state import EARLIEST

        ((ends, expected),), now = pairs, given[0]
        alive = (now.rows.scores > now.items.scores[:, -1:])[:, : ends.shape[2]] & (now.rules.power > 0)
        pairs = [(ends[:EARLIEST], expected[:EARLIEST]), (ends[EARLIEST][alive], expected[EARLIEST][alive])]
    if call["name"] == "best":  # places of no candidate mean nothing
        (keys, expected), (places, at) = pairs
        from itemset.ranking.beam_state import NOTHING

        pairs = [(keys, expected), (places[expected != NOTHING], at[expected != NOTHING])]
    from itemset.ranking.beam_state import BOOST, COLUMNS, LOG, SCORE

    differ, largest = 0, 0.0
    for one, other in pairs:
        if call["name"] == "follow" and len(one) == COLUMNS:  # the table: some of its columns hold the bits of floats
            floats = [SCORE, LOG, BOOST]
            whole = [column for column in range(COLUMNS) if column not in floats]
            largest = max(largest, _apart(one[floats].view(torch.float64), other[floats].view(torch.float64)))
            one, other = one[whole], other[whole]
        if one.is_floating_point() and call["of"] != "masking":
            largest = max(largest, _apart(one, other))
        else:
            differ += int((one != other).sum())
    return differ, largest


def _apart(one: Tensor, other: Tensor) -> float:
    one, other = one.double(), other.double()
    if not one.numel():
        return 0.0
    gap = (one - other).abs() / other.abs().clamp(min=1)
    gap[one == other] = 0  # equal infinities
    return float(gap.nan_to_num(float("inf")).max())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


def replay(
    path: Path, device: str, emit: Emit, *, graph: bool, every: int = 1, late: Callable[[], bool] = lambda: False
) -> None:
    """Run the calls, and emit a row for each kernel, dtype and alignment. graph: once more as a replayed CUDA graph.

    every: of how many calls one is run. late: asked before each whether to stop.
    """
    calls = load(path)
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for number, call in enumerate(calls[::every]):
        if late():
            emit({"kernel": "the rest", "calls": len(calls) - number, "skipped": "the time was up"})
            break
        masks = call.get("logits") is not None
        for form in ("eager", "graph") if graph else ("eager",):
            dtype, aligned = DTYPES[number % 3], number % 2 == 0
            key = (call["name"], *((str(dtype)[6:], aligned) if masks else ()), form)
            row = rows.setdefault(key, {"kernel": key[0], "form": form, "calls": 0, "differ": 0, "largest": 0.0})
            if masks:
                row |= {"dtype": key[1], "aligned": aligned}
            work, given, made = run(call, device, dtype=dtype, aligned=aligned)
            try:
                before = copied(given) if form == "graph" else given
                result = work()
                if form == "graph":
                    result = _captured(work, given, before)
                differ, largest = compare(call, result, given, made)
            except Exception as error:  # a row, not an end
                row["failed"] = f"{type(error).__name__}: {error}"[:200]
                continue
            row["calls"] += 1
            row["differ"] += differ
            row["largest"] = max(row["largest"], largest)
    for row in rows.values():
        bound = 0.02 if row["kernel"] == "add_own" else NEAR
        emit(row | {"ok": "failed" not in row and row["differ"] == 0 and row["largest"] <= bound})


def _captured(work: Callable[[], Any], given: tuple[Any, ...], before: tuple[Any, ...]) -> Any:
    """Capture a call that has run once, and replay it on its arguments as they were."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    for now, then in zip(_tensors(given), _tensors(before), strict=True):
        now.copy_(then)
    graph.replay()
    torch.cuda.synchronize()
    return result


def engine_shapes(device: str) -> None:
    """Launch what an engine's start does: a vocabulary of 151,936, bf16 and float32, its marks and drafts."""
    import itemset
    from itemset.masking.arena import Arena, room_for
    from itemset.masking.batch import Batch
    from itemset.masking.slots import MAX_STOP_TOKENS, Slots
    from itemset.ranking.beams import warm_up

    item_set = itemset.build([[0, 0, 1], [0, 1]])
    arena = Arena(2 * room_for(item_set), device, kernels="triton")
    slots = Slots(arena, 4, max_rows=4, max_stop_tokens=MAX_STOP_TOKENS)

    def zeros(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.zeros(shape or 1, dtype=dtype, device=device)

    short, history = zeros(torch.int32), zeros(torch.int32, 4, 64)
    own = {"history": history, "begin": zeros(torch.int32, 4), "end": zeros(torch.int32, 4)}
    given = {"above": short, "tokens": short, "positions": zeros(torch.int64)}
    for index in (torch.int64, torch.int32):
        for more in ({}, given):
            batch = Batch(zeros(index), **own, **more)
            for vocabulary in (2_048, 8_192, ENGINE_VOCABULARY):
                for dtype in (torch.bfloat16, torch.float32):
                    logits = zeros(dtype, 1, vocabulary)
                    slots.step(batch, logits)
                    slots.mask(slots.walk(batch), zeros(index), logits)
    for dtype in (torch.bfloat16, torch.float32):
        warm_up(arena, zeros(dtype, 1, 1, ENGINE_VOCABULARY))


if __name__ == "__main__":
    what, file = sys.argv[1], Path(sys.argv[2])
    if what == "record":
        record(file, "few" in sys.argv)
    else:
        import gpu_nodev

        replay(file, "cpu", lambda row: None, graph=False)
        engine_shapes("cpu")
        gpu_nodev.only_what_runs()
        print(f"{len(gpu_nodev.compiled)} compiled of {len(gpu_nodev.launched)} launches")
