"""Selection: which of the offered parts serves a demand, and why every other one does not.

Offers and a demand in, a choice with all its reasons out; nothing is looked at beside them but
which modules are installed and which kernels compiled. Parts that constrain each other are chosen
together: attention as a pair of prefill and decode backend, experts as a pair of kernel and
dispatcher. An explicit choice is honoured or refused, never replaced. `auto` goes by band, then
measured order, then name; of a pair the slower band counts first. Parts that are not first-party
enter `auto` only where their distribution is opted in, and `auto` waits for no compiler.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Generic, TypeVar

from rackmount_registry.capabilities import Demand, ExpertLayout
from rackmount_registry.descriptors import (
    AttentionBackend,
    ComputeDescriptor,
    Executor,
    ExpertKernel,
    GrammarBackend,
    OpSet,
    TokenDispatcher,
)
from rackmount_registry.errors import SelectionError
from rackmount_registry.offers import (
    BANDS,
    BrokenPlugin,
    Offer,
    broken_note,
    find_offer,
    import_attribute,
)

AUTO = "auto"
PHASES = ("prefill", "decode")

A = TypeVar("A", bound=ComputeDescriptor)
B = TypeVar("B", bound=ComputeDescriptor)
C = TypeVar("C", bound=ComputeDescriptor)
C_co = TypeVar("C_co", bound=ComputeDescriptor, covariant=True)
K = TypeVar("K", Executor, GrammarBackend)
T = TypeVar("T", int, str)


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """Why one row of a part's table, or the part as a whole, does not serve."""

    row: int | None
    """Index of the cell; None for the part as a whole."""
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        where = "" if self.row is None else f"row {self.row}: "
        return where + ", and ".join(self.reasons)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One part held against a demand."""

    name: str
    distribution: str
    version: str
    band: str
    accepted: bool
    refusals: tuple[Refusal, ...]
    """Of an accepted part too: the rows that do not serve."""

    some_row_fits: bool

    def __str__(self) -> str:
        """With the reasons that decide: those of rows count where no row fits, and of these the
        rows that lack the least. They come first: what no row serves need not be installed."""
        rows = [it for it in self.refusals if it.row is not None and not self.some_row_fits]
        fewest = min((len(it.reasons) for it in rows), default=0)
        deciding = [it for it in rows if len(it.reasons) == fewest]
        deciding += [it for it in self.refusals if it.row is None]
        verdict = "fits" if self.accepted else "; ".join(map(str, deciding))
        return f"{self.name} ({self.distribution} {self.version}): {verdict}"


@dataclass(frozen=True, kw_only=True)
class PairCandidate:
    """Two parts held against a demand and against each other."""

    first: Candidate
    second: Candidate
    accepted: bool
    reasons: tuple[str, ...]
    """Why two parts that each fit do not fit together."""

    def __str__(self) -> str:
        if self.accepted or self.reasons:
            verdict = "fits" if self.accepted else "; ".join(self.reasons)
            return f"{self.first.name} + {self.second.name}: {verdict}"
        parts = (str(part) for part in (self.first, self.second) if not part.accepted)
        return " | ".join(dict.fromkeys(parts))


@dataclass(frozen=True, kw_only=True)
class Choice(Generic[C_co]):
    """One part of a kind, chosen."""

    kind: str
    requested: str
    winner: Offer[C_co] | None
    """None: `auto` found none that fits."""
    why: str
    candidates: tuple[Candidate, ...]
    """In the order of `auto`."""

    def require(self) -> Offer[C_co]:
        """The winner.

        Raises:
            SelectionError: there is none; the message says what refused each candidate.
        """
        if self.winner is None:
            raise SelectionError(self.why, self.candidates)
        return self.winner


@dataclass(frozen=True, kw_only=True)
class AttentionChoice:
    """The pair of backends that share one KV cache."""

    prefill: Offer[AttentionBackend]
    decode: Offer[AttentionBackend]
    block_size: int
    cache_layout: str
    why: str
    candidates: tuple[PairCandidate, ...]
    """First is prefill, second is decode."""


@dataclass(frozen=True, kw_only=True)
class ExpertsChoice:
    """The expert kernel and the dispatcher that feeds it."""

    kernel: Offer[ExpertKernel]
    dispatcher: Offer[TokenDispatcher]
    layout: ExpertLayout
    why: str
    candidates: tuple[PairCandidate, ...]
    """First is the kernel, second is the dispatcher."""


@dataclass(frozen=True)
class _Side(Generic[C]):
    """All offers of one kind held against a demand."""

    kind: str
    offers: Sequence[Offer[C]]
    demand: Demand
    requested: str
    opted_in: Collection[str]
    broken: Sequence[BrokenPlugin]

    @cached_property
    def wanted(self) -> Offer[C] | None:
        """The offer that was asked for; None for `auto`."""
        if self.requested == AUTO:
            return None
        return find_offer(
            self.kind, self.offers, self.requested, broken=self.broken, error=SelectionError
        )

    @cached_property
    def held(self) -> list[tuple[Offer[C], Candidate]]:
        """In the order of `auto`."""
        return [(offer, self._hold(offer)) for offer in sorted(self.offers, key=self.rank)]

    def rank(self, offer: Offer[C]) -> tuple[int, float, str, str]:
        """Place in the order of `auto`."""
        part = offer.descriptor
        order = math.inf if (measured := self._order(part)) is None else measured
        return BANDS.index(part.band), order, offer.name, offer.distribution

    def _order(self, part: C) -> int | None:
        """Measured order; None: only when asked for."""
        if isinstance(part, AttentionBackend) and self.demand.phase == "decode":
            return part.decode_order
        return part.order

    def _hold(self, offer: Offer[C]) -> Candidate:
        rows = tuple(
            Refusal(row=index, reasons=reasons)
            for index, cell in enumerate(offer.descriptor.cells)
            if (reasons := cell.refusals(self.demand))
        )
        fits = len(rows) < len(offer.descriptor.cells)
        whole = offer.missing()
        if self.wanted is None:
            whole += self._barriers(offer)
            if fits and not whole:
                whole += _to_compile(offer, self.demand)
        return Candidate(
            name=offer.name,
            distribution=offer.distribution,
            version=offer.version,
            band=offer.descriptor.band,
            accepted=fits and not whole,
            some_row_fits=fits,
            refusals=((Refusal(row=None, reasons=whole),) if whole else ()) + rows,
        )

    def _barriers(self, offer: Offer[C]) -> tuple[str, ...]:
        """What keeps a part out of `auto` alone."""
        reasons = []
        if not offer.first_party and offer.distribution not in self.opted_in:
            reasons.append("an outside plugin, not opted in: ask for it by name")
        rivals = [o.distribution for o in self.offers if o.name == offer.name and o is not offer]
        if rivals:
            choice = f"{offer.distribution}:{offer.name}"
            reasons.append(f"{' and '.join(rivals)} offers this name too: ask for {choice}")
        if self._order(offer.descriptor) is None:
            phase = f"for {self.demand.phase} " if self.demand.phase else ""
            reasons.append(f"only {phase}where it is asked for by name")
        return tuple(reasons)


def choose(
    kind: str,
    offers: Sequence[Offer[C]],
    demand: Demand,
    requested: str = AUTO,
    opted_in: Collection[str] = frozenset(),
    broken: Sequence[BrokenPlugin] = (),
) -> Choice[C]:
    """One part for `demand`: the one called `requested` (a name or "dist:name"), or the best that
    fits.

    Raises:
        SelectionError: `requested` is unknown, contested, or refused. With `auto` nothing is raised
            here: a choice without a winner says why.
    """
    side = _Side(kind, offers, demand, requested, opted_in, broken)
    wanted, held = side.wanted, side.held
    candidates = tuple(candidate for _, candidate in held)
    fitting = [offer for offer, candidate in held if candidate.accepted]
    if wanted is None and fitting:
        winner, why = fitting[0], _first_of(len(fitting))
    elif wanted is None:
        winner, why = None, _none_fits(f"no {kind} fits", candidates, broken)
    elif wanted in fitting:
        winner, why = wanted, "requested"
    else:
        refused = next(candidate for offer, candidate in held if offer is wanted)
        would = ", ".join(offer.name for offer in fitting) or "none"
        raise SelectionError(f"{kind} {refused}. Would fit: {would}", candidates)
    return Choice(kind=kind, requested=requested, winner=winner, why=why, candidates=candidates)


def choose_each(
    kind: str,
    offers: Sequence[Offer[C]],
    demands: Mapping[str, Demand],
    requested: str = AUTO,
    opted_in: Collection[str] = frozenset(),
    broken: Sequence[BrokenPlugin] = (),
) -> dict[str, Choice[C]]:
    """One part for each of `demands`, by its name. The requested one serves all that it fits;
    `auto` finds the rest.

    Raises:
        SelectionError: the requested part is unknown or contested, or fits none of them.
    """
    choices, refused = {}, {}
    for name, demand in demands.items():
        try:
            choices[name] = choose(kind, offers, demand, requested, opted_in, broken)
        except SelectionError as error:
            refused[name] = error
    if refused and not choices:
        raise next(iter(refused.values()))
    for name in refused:
        choice = choose(kind, offers, demands[name], AUTO, opted_in, broken)
        choices[name] = replace(choice, why=f"{requested} does not take it; {choice.why}")
    return {name: choices[name] for name in demands}


def choose_ops(
    offers: Sequence[Offer[OpSet]],
    demand: Demand,
    ops: Sequence[str],
    requested: str = AUTO,
    opted_in: Collection[str] = frozenset(),
    broken: Sequence[BrokenPlugin] = (),
) -> dict[str, Choice[OpSet]]:
    """An op set for each operation. The requested one serves all that it offers; `auto` finds the
    rest.

    Raises:
        SelectionError: the requested op set is unknown, contested, or refused for an operation that
            it offers.
    """
    wanted = _Side(OpSet.kind, offers, demand, requested, opted_in, broken).wanted
    choices = {}
    for op in ops:
        offering = [offer for offer in offers if op in offer.descriptor.ops]
        if wanted is None or wanted in offering:
            choices[op] = choose(OpSet.kind, offering, demand, requested, opted_in, broken)
        else:
            choice = choose(OpSet.kind, offering, demand, AUTO, opted_in, broken)
            choices[op] = replace(choice, why=f"{requested} does not offer it; {choice.why}")
    return choices


def choose_attention(
    offers: Sequence[Offer[AttentionBackend]],
    demand: Demand,
    requested: str = AUTO,
    block_size: int | None = None,
    opted_in: Collection[str] = frozenset(),
    broken: Sequence[BrokenPlugin] = (),
) -> AttentionChoice:
    """Backends for prefill and decode that name one cache layout and agree on a block size.

    The block size is the given one, or the first that the prefill backend prefers and both take. A
    requested name serves both phases; `auto` goes by each phase's own order.

    Raises:
        SelectionError: `requested` is unknown, contested or refused, or no pair fits.
    """
    demands = [replace(demand, phase=phase, block_size=block_size) for phase in PHASES]
    sides = [
        _Side(AttentionBackend.kind, offers, each, requested, opted_in, broken) for each in demands
    ]

    def agree(*pair: Offer[AttentionBackend]) -> tuple[int | None, str]:
        layouts = [offer.descriptor.cache_layout for offer in pair]
        if layouts[0] != layouts[1]:
            return None, f"cache layouts {layouts[0]} and {layouts[1]} differ"
        preferred = pair[0].descriptor.preferred_block_sizes
        for size in preferred if block_size is None else (block_size,):
            if all(map(_fits, pair, (replace(each, block_size=size) for each in demands))):
                return size, ""
        return None, f"no block size of {', '.join(map(str, preferred))} suits both"

    first, second, size, why, candidates = _choose_pair(sides[0], sides[1], agree)
    return AttentionChoice(
        prefill=first,
        decode=second,
        block_size=size,
        cache_layout=first.descriptor.cache_layout,
        why=why,
        candidates=candidates,
    )


def choose_experts(
    kernel_offers: Sequence[Offer[ExpertKernel]],
    dispatcher_offers: Sequence[Offer[TokenDispatcher]],
    demand: Demand,
    requested_kernel: str = AUTO,
    requested_dispatcher: str = AUTO,
    opted_in: Collection[str] = frozenset(),
    broken: Sequence[BrokenPlugin] = (),
) -> ExpertsChoice:
    """A kernel and a dispatcher whose layout one of the kernel's rows takes.

    Raises:
        SelectionError: a requested name is unknown, contested or refused, or no pair fits.
    """
    kernels = _Side(ExpertKernel.kind, kernel_offers, demand, requested_kernel, opted_in, broken)
    dispatchers = _Side(
        TokenDispatcher.kind, dispatcher_offers, demand, requested_dispatcher, opted_in, broken
    )

    def agree(
        kernel: Offer[ExpertKernel], dispatcher: Offer[TokenDispatcher]
    ) -> tuple[str | None, str]:
        layout = dispatcher.descriptor.layout
        if _fits(kernel, replace(demand, layout=layout)):
            return layout, ""
        return None, f"no row of {kernel.name} that fits takes the layout {layout}"

    kernel, dispatcher, _, why, candidates = _choose_pair(kernels, dispatchers, agree)
    return ExpertsChoice(
        kernel=kernel,
        dispatcher=dispatcher,
        layout=dispatcher.descriptor.layout,
        why=why,
        candidates=candidates,
    )


def first_in_order(offers: Sequence[Offer[K]], opted_in: Collection[str]) -> Offer[K] | None:
    """Of parts that no capability tells apart, the one that `auto` takes, if any."""
    tried = [
        offer
        for offer in offers
        if offer.descriptor.order is not None
        and (offer.first_party or offer.distribution in opted_in)
    ]
    return min(tried, key=lambda offer: (offer.descriptor.order, offer.name), default=None)


def _choose_pair(
    a: _Side[A], b: _Side[B], agree: Callable[[Offer[A], Offer[B]], tuple[T | None, str]]
) -> tuple[Offer[A], Offer[B], T, str, tuple[PairCandidate, ...]]:
    """The best pair of those asked for, what it agreed on, why, and all pairs in the order of
    `auto`.

    `agree` gives the common value, or None and the reason. It is asked only where both parts fit by
    themselves.
    """
    held: list[tuple[Offer[A], Offer[B], T | None, PairCandidate]] = []
    for (one, first), (two, second) in product(a.held, b.held):
        both = first.accepted and second.accepted
        value, reason = agree(one, two) if both else (None, "")
        pair = PairCandidate(
            first=first,
            second=second,
            accepted=value is not None,
            reasons=(reason,) if reason else (),
        )
        held.append((one, two, value, pair))
    held.sort(key=lambda row: _pair_rank(a.rank(row[0]), b.rank(row[1])))
    candidates = tuple(row[3] for row in held)
    num_fitting = sum(pair.accepted for pair in candidates)
    asked = [row for row in held if a.wanted in (None, row[0]) and b.wanted in (None, row[1])]
    for one, two, value, _ in asked:
        if value is not None:
            named = a.wanted is not None and b.wanted is not None
            why = "requested" if named else _first_of(num_fitting)
            return one, two, value, why, candidates
    wanted = [side.kind for side in (a, b) if side.wanted is not None]
    kinds = tuple(dict.fromkeys(wanted or (a.kind, b.kind)))
    parts, verb = " and ".join(kinds), "does" if len(kinds) == 1 else "do"
    whole = f"the {parts} asked for {verb} not fit" if wanted else f"no {parts} fits"
    message = _none_fits(whole, [row[3] for row in asked], a.broken)
    alike = a.kind == b.kind  # one name is asked for both
    fit = [p for p in candidates if p.accepted and not (alike and p.first.name != p.second.name)]
    would = ", ".join(p.first.name if alike else f"{p.first.name} + {p.second.name}" for p in fit)
    would = would or ("auto" if any(p.accepted for p in candidates) else "none")
    raise SelectionError(f"{message}. Would fit: {would}", candidates)


def _pair_rank(*ranks: tuple[int, float, str, str]) -> tuple[object, ...]:
    return max(band for band, *_ in ranks), *ranks


def _to_compile(offer: Offer[ComputeDescriptor], demand: Demand) -> tuple[str, ...]:
    """Why the part would have to be compiled before it serves `demand`."""
    part = offer.descriptor
    if not isinstance(part, AttentionBackend) or not part.jit:
        return ()
    whole = f"{part.kind} {offer.name!r} of {offer.distribution} {offer.version}"
    reason = import_attribute(part.jit, whole)(demand)
    return (reason,) if reason else ()


def _fits(offer: Offer[ComputeDescriptor], demand: Demand) -> bool:
    return any(not cell.refusals(demand) for cell in offer.descriptor.cells)


def _first_of(num_fitting: int) -> str:
    if num_fitting == 1:
        return "the only one that fits"
    return f"first of {num_fitting} that fit, by band, order and name"


def _none_fits(whole: str, candidates: Sequence[object], broken: Sequence[BrokenPlugin]) -> str:
    refused = "; ".join(map(str, candidates)) or "none is mounted"
    return f"{whole}: {refused}{broken_note(broken)}"
