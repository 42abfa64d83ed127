"""What was measured, and how it compares. Pure: no clock, no files.

Figures are compared only within one placement of the cores: see README.md, "near and far".
"""
import dataclasses
import statistics

NEAR_NS = 150  # one way of a cache line; two cores that share a cache take 50, others 240
MOVED = 1.6  # before and after differ by more: the cores were moved in between
DISTURBED_PERCENT = 4.0  # of the machine, used by others or stolen

OURS = ("ringfold", "auto")  # what a user gets
REGISTERED = ("ringfold", "registered")  # with buffers of the library's own
LIMITS = "limits"


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement of one configuration."""
    library: str
    configuration: str
    ranks: int
    bytes: int
    place: str  # "ip" or "oop"
    iterations: int
    loop_min_us: float
    loop_us: float
    sync_min_us: float
    sync_us: float
    wrong: int
    foreign_percent: float
    steal_percent: float
    line_before_ns: float
    line_after_ns: float
    cpu_us: float  # of all ranks together, a call

    @property
    def name(self):
        return (self.library, self.configuration)

    @property
    def moved(self):
        low, high = sorted((self.line_before_ns, self.line_after_ns))
        return high > MOVED * low

    @property
    def disturbance(self):
        """The smaller the better; above DISTURBED_PERCENT it is worth a repetition."""
        return self.foreign_percent + self.steal_percent + (100 if self.moved else 0)

    @property
    def disturbed(self):
        return self.disturbance > DISTURBED_PERCENT

    @property
    def placement(self):
        """"near", "far", or "one core" where there is nothing to be near to."""
        line = max(self.line_before_ns, self.line_after_ns)
        return "one core" if line == 0 else "near" if line < NEAR_NS else "far"


def parse_answer(library, configuration, ranks, line):
    """The Row in a program's answer; ValueError if it is none."""
    fields = line.strip().split(",")
    types = [field.type for field in dataclasses.fields(Row)[3:]]
    if len(fields) != len(types):
        raise ValueError(f"{len(fields)} fields instead of {len(types)}: {line!r}")
    return Row(library, configuration, ranks, *(kind(text) for kind, text in zip(types, fields)))


@dataclasses.dataclass(frozen=True)
class Figure:
    """Medians of one configuration at one size, place and placement."""
    loop_us: float
    sync_us: float
    disturbed: bool  # nothing better was to be had


def figure_of(rows):
    """Of the undisturbed ones; of the least disturbed if there are none."""
    good = [row for row in rows if not row.disturbed]
    used = good or [min(rows, key=lambda row: row.disturbance)]
    return Figure(statistics.median(row.loop_us for row in used),
                  statistics.median(row.sync_us for row in used), not good)


def figures(rows):
    """{(ranks, bytes, place, placement): {(library, configuration): Figure}}"""
    groups = {}
    for row in rows:
        at = groups.setdefault((row.ranks, row.bytes, row.place, row.placement), {})
        at.setdefault(row.name, []).append(row)
    return {key: {name: figure_of(group) for name, group in at.items()}
            for key, at in sorted(groups.items())}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Ours against the others at one size. Ratios: our time / theirs; None where one is missing."""
    ranks: int
    bytes: int
    place: str
    placement: str
    ours: Figure  # None: not measured here
    registered: Figure
    best: tuple  # (library, configuration) of the fastest peer back to back; None: no peer
    best_us: float
    ratio: float
    sync_ratio: float  # to the fastest peer of synchronised calls
    gloo_ratio: float  # to Gloo's fastest configuration
    copy_us: float  # every rank copies the bytes once
    limit_us: float  # two ranks: the slower of cross_read and direct2
    disturbed: bool


def compare(rows):
    """A Comparison for every size at which something was measured."""
    by_place = figures(rows)
    return [comparison(key, at, by_place.get((key[0], key[1], "oop", key[3]), {}))
            for key, at in by_place.items()
            if any(name[0] != LIMITS for name in at)]


def comparison(key, at, out_of_place):
    """`out_of_place`: where the limits of this size are."""
    ours = at.get(OURS)
    peers = {name: figure for name, figure in at.items() if name[0] not in (OURS[0], LIMITS)}
    best = min(peers, key=lambda name: peers[name].loop_us, default=None)
    gloo = [figure.loop_us for name, figure in peers.items() if name[0] == "gloo"]
    ratio = sync_ratio = gloo_ratio = None
    if ours and best:
        ratio = ours.loop_us / peers[best].loop_us
        sync_ratio = ours.sync_us / min(figure.sync_us for figure in peers.values())
    if ours and gloo:
        gloo_ratio = ours.loop_us / min(gloo)
    limits = {name[1]: figure.loop_us for name, figure in out_of_place.items()
              if name[0] == LIMITS}
    exchange = [limits.get("cross_read"), limits.get("direct2")]
    return Comparison(
        *key, ours=ours, registered=at.get(REGISTERED), best=best,
        best_us=peers[best].loop_us if best else None, ratio=ratio, sync_ratio=sync_ratio,
        gloo_ratio=gloo_ratio, copy_us=limits.get("memcpy"),
        limit_us=None if None in exchange else max(exchange),
        disturbed=bool((ours and ours.disturbed) or (best and peers[best].disturbed)))
