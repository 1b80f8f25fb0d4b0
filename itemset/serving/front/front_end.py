"""What both front ends do: from a judged request to what its engine gets, and to what its answers are read with."""

import copy
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from itemset.embedded.holes import Vocabulary
from itemset.errors import ItemSetError, shown
from itemset.item_set import ItemSet
from itemset.ranking.search import Rounds
from itemset.select.filters import known
from itemset.serving import metrics
from itemset.serving.catalogue import InlineSet, RefusedError
from itemset.serving.config import ModelLimits, StaticConfig, Words
from itemset.serving.constraint import Constraint
from itemset.serving.front import audit
from itemset.serving.front.admission import Checks
from itemset.serving.front.answer_fields import Expected, ExpectedItems
from itemset.serving.front.beside import at_once
from itemset.serving.front.embedded_sets import Constraints
from itemset.serving.front.healing import HEALED, Healing
from itemset.serving.front.list_runner import OneRequest, search_for
from itemset.serving.front.request import ItemRequest
from itemset.serving.front.request_fields import ATTRIBUTES, LIST_AFTER, NO_ATTRIBUTES, PROMPT, ListOptions, wrong_type
from itemset.serving.front.selections import Prompt, steering_of
from itemset.serving.front.version_watcher import Follower, Send
from itemset.serving.wire import INLINE, EngineRequest, Tokens
from itemset.text import encode


class ListJob(NamedTuple):
    """A ranked list, or the draws of one prompt, that is to be made."""

    item_set: ItemSet
    search: Rounds
    of_set: Mapping[str, str]  # what its answer says of the set
    carried: EngineRequest | None  # by the request by which the engine makes it; None if rounds of requests must
    placeholders: Tokens  # token ids after the prompt if a draft head makes it
    reference: str  # of the set
    names: Sequence[str]  # which attributes of items its answer says


class FrontEndBase:
    """One of each process that takes requests. Safe for threads."""

    follower: Follower | None = None  # of the published sets among the registered ones, once the engine can be asked
    # Returns the placeholders of a `ListJob`; raises RefusedError without room for it. None without a draft head.
    drafting: Callable[[InlineSet, ListOptions], Tokens] | None = None
    words: ClassVar[Words]  # the engine's, as is the next
    log: ClassVar[logging.Logger]
    host_path: bool  # whether masks are made on the host; set by `_begin`

    def __init__(
        self, config: StaticConfig, tokenizer: Any, limits: ModelLimits, vocabulary: Callable[[], Vocabulary],
        one_request: OneRequest, *, json_options: Mapping[str, Any], added_tokens: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Open and check the registered sets. Raises ItemSetError as `Checks` does."""
        # The engine changes its own between two uses, on other threads than ours.
        self._tokenizer = tokenizer = copy.deepcopy(tokenizer)
        self.config, self.one_request, self.vocab_size = config, one_request, limits.vocab_size
        self.checks = Checks(config, tokenizer, self.words, limits, self.log, added_tokens)
        self.constraints = Constraints(self.checks, vocabulary, options=json_options, validate=self.validate)
        self.healing = Healing(self.checks.catalogue, tokenizer)

    def _begin(self, backend: str, why_on_host: str | None, *, here: bool, model: str) -> None:
        """Note and log where masks are made. backend: the engine's word for it. why_on_host: see `StaticConfig`. here:
        whether all processes of the engine are on this machine, where forms of sets lie. model: its name."""
        if self.config.item_set_audit_log is not None:
            audit.begin(self.config.item_set_audit_log, model, self.log)
        for name in self.checks.catalogue.registered:  # from 0 on, so that a rate sees a first answer
            metrics.ANSWERED.labels(name)
            metrics.FORCED.labels(name)
        self.healing.on = self.config.item_set_token_healing and here and self.drafting is None
        self.host_path = why_on_host is not None
        path = f"host path: {why_on_host}" if self.host_path else "device path, masks inside the sampler"
        sets = ", ".join(f"{name} ({len(one):,} items)" for name, one in self.checks.catalogue.registered.items())
        self.log.info("%s static, %s. Item sets: %s", backend, path, sets or "none")

    @staticmethod
    def validate(kind: str, spec: str) -> None:
        """Raises what it likes for a constraint that the engine itself refuses, see `Constraints`."""

    @property
    def sets_by_model(self) -> Collection[str]:
        """Names of the sets that a request may name after its model."""
        return [*self.checks.catalogue.serving] if self.config.item_set_models else ()

    def follow(self, send: Send) -> Follower:
        """Return what follows the published sets from now on, once it is started. send: reaches the engines."""
        path, by_rounds = "host" if self.host_path else "device", lambda: self.one_request.by_rounds
        self.follower = Follower(self.checks, self.config, send, path=path, log=self.log, by_rounds=by_rounds)
        return self.follower

    async def healed(self, asked: ItemRequest, prompt: str, *, here: bool = False) -> ItemRequest:
        """Return the request with its set, HEALED if the space at the end of its prompt is its items' (`healing`); as
        it was if it is not, or they cannot be spelt so. here: as for `prepare`."""
        if (healed := self.healing.healed(asked, prompt)) is asked:
            return asked
        try:
            return await self.prepare(healed, prompt, here=here) or asked
        except ItemSetError:
            return asked

    def pinned(self, asked: ItemRequest, prompt: Prompt | None = None) -> ItemRequest | None:
        """Do `prepare` here: wait until the set or constraint is made."""
        return at_once(self.prepare(asked, prompt, here=True))

    async def prepare(
        self, asked: ItemRequest, prompt: Prompt | None = None, *, here: bool = False
    ) -> ItemRequest | None:
        """Return the request with its set or constraint, whatever version is served later; None if no set stands in it.

        Without the `prompt`, a request that excludes its items is only checked. here: see `at_once`; else it is made
        beside the event loop, and encoding stops if this is cancelled and no other request waits for it. Raises as
        `Checks.prepare` and `Constraints.prepare` do.
        """
        if asked.made is not None:
            return asked
        made: InlineSet | Constraint | None
        if asked.constraint is None:
            made = await self.checks.prepare(asked, prompt, here=here)
        else:
            made = await self.constraints.prepare(*asked.constraint, here=here)
        return self._with(asked, made, prompt)

    def _with(self, asked: ItemRequest, made: InlineSet | Constraint | None, prompt: object) -> ItemRequest | None:
        """Return the request with what was made for it. Raises RefusedError for attributes that its sets have not."""
        if made is None:
            if asked.attributes:
                raise wrong_type(NO_ATTRIBUTES, ATTRIBUTES)
            return None
        names, quotas = asked.attributes or (), getattr(asked.several, "at_most", None) or ()
        if names or quotas:
            schemas = [one.item_set.attribute_schema for one in (made.sets if isinstance(made, Constraint) else [made])]
            there = dict.fromkeys(name for schema in schemas for name in schema.names)
            names = (*there,) or ("",) if names is True else names
            for word, name in (*((ATTRIBUTES, name) for name in names), *(("at_most", name) for name in quotas)):
                if name not in there:
                    which = f"no attribute {shown(name)}" if name else "no attribute"
                    raise wrong_type(f"{word}: there is {which}: {known(schemas)}", word)
        if prompt is None and PROMPT in asked.selection:
            return asked
        return replace(asked, made=made, marker=self._marker(asked.after), attributes=names)

    def _marker(self, after: str | bool) -> Tokens:
        """Return the tokens that end a thought. Raises RefusedError if there can be none."""
        if after is True and not (end := self.reasoning_end()):
            raise wrong_type(
                f"this server knows no end of the model's reasoning: give its text as {LIST_AFTER}", LIST_AFTER
            )
        if isinstance(after, bool):
            return end if after else ()
        try:
            return tuple(encode([after], self._tokenizer, escape="text", name=LIST_AFTER)[0].tolist())
        except ItemSetError as error:
            raise wrong_type(str(error), LIST_AFTER) from error

    @staticmethod
    def refuse_inside(holds_sets: bool) -> None:
        """Raises RefusedError if sets stand in the grammar of a thought."""
        if holds_sets:
            message = f"an item set inside the grammar of a thought would be lost: leave {LIST_AFTER} or that set out"
            raise RefusedError("two constraints", message, LIST_AFTER)

    def reasoning_end(self) -> Tokens:
        """Return the tokens at which the model's reasoning ends, none if that is not known."""
        raise NotImplementedError

    def engine_request(
        self, asked: ItemRequest, *, stop_tokens: set[int], prompt_tokens: int, min_tokens: int
    ) -> EngineRequest:
        """Return what a request that is `pinned` carries to the engine. Counts it.

        Raises RefusedError where a set and the other parameters leave no way to end an item.
        """
        grammar = asked.made if isinstance(asked.made, Constraint) else None
        sets = [self.checks.made(asked)] if grammar is None else grammar.sets
        least = min_tokens if grammar is None else 0
        for one in sets:
            self.checks.request(one, prompt_tokens=prompt_tokens, min_tokens=least, stop_tokens=stop_tokens)
        for one in sets:
            metrics.REQUESTS.labels(metrics.label(one.reference)).inc()
        if grammar is None:
            return EngineRequest(sets[0].ref, weighed=asked.weighed)
        return EngineRequest(grammar=grammar.spec(), sets=[one.ref for one in sets])

    def begin_list(self, asked: ItemRequest, *, prompt_tokens: int, after: int, reasons: Mapping[str, bool]) -> ListJob:
        """Begin a request's ranked list or draws, and count it; return what has begun with a thought that has ended.

        after: context tokens that must stay free after an item. reasons: see `OneRequest.spec`. Raises RefusedError if
        the list may not be so long, or an item has no room in the context, and as `Checks.made` does.
        """
        if asked.ended is not None and asked.ended.jobs:
            return asked.ended.jobs.pop()
        made, placeholders, options = self.checks.made(asked), Tokens(), asked.several
        assert options is not None
        listed, end_token = options, self._tokenizer.eos_token_id
        if isinstance(options, ListOptions):
            most = min(self.config.ranked_list_limit, self.one_request.usual_beams(made.reference))
            options = options.with_beams(len(made.item_set), most, made.item_set.is_steered)
            listed = options.of_engine(len(made.item_set), most)
            if self.drafting is not None and not options.explore:  # draws are by the model
                placeholders = self.drafting(made, listed)
        after += len(placeholders)
        self.checks.request(made, prompt_tokens=prompt_tokens, min_tokens=0, stop_tokens=[end_token], after=after)
        _, boost = steering_of(asked.selection)
        search = search_for(made.item_set, options, end_token, self.config, self.words, boost)
        metrics.REQUESTS.labels(metrics.label(asked.item_set or INLINE)).inc()
        spec = self.one_request.spec(listed, made.reference, search, end_token, len(placeholders), reasons)
        carried = None if spec is None else EngineRequest(made.ref, spec)
        of_set = self.checks.catalogue.version_fields(made.reference)
        return ListJob(made.item_set, search, of_set, carried, placeholders, made.reference, asked.names)

    def expected(
        self, asked: ItemRequest, stop_tokens: frozenset[int], content: Callable[[Sequence[int]], Sequence[int]] | None
    ) -> Expected | ExpectedItems:
        """Return what names the items of the answers to a `pinned` request. content: see `Expected`."""
        catalogue = self.checks.catalogue
        if isinstance(asked.made, Constraint):
            vocabulary = self.constraints.vocabulary.get()
            return ExpectedItems(asked.made, vocabulary, catalogue, stop_tokens, content, asked.names)
        made = self.checks.made(asked)
        of_set = catalogue.version_fields(made.reference)
        told = (of_set, asked.weighed, asked.names, made.reference)
        return Expected(made.item_set, stop_tokens, content, *told, healed=asked.escape == HEALED)

    @staticmethod
    def check_weight(weighed: str, reason: str | None, *, instead_of: str | None, ignore_eos: Any) -> None:
        """Raises RefusedError if answers cannot say these log-probabilities.

        reason: why this engine gives none. instead_of: what the request asks for that comes in the same place.
        """
        if instead_of:
            reason = f"it comes in the place of {instead_of}: ask for one of them"
        if ignore_eos:
            reason = "with ignore_eos an answer goes on after its end: leave one of them out"
        if reason:
            raise RefusedError("set weight", f"{weighed} cannot be had here: {reason}", weighed)
