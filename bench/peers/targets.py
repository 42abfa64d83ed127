"""What ringfold has to reach on one host, as ratios within one run and one placement. Pure."""
import dataclasses

KI, MI = 1 << 10, 1 << 20

# Ours / the best peer. Columns: (first, last size, places).
COLUMNS = [(8, 64, "ip oop"), (KI, 4 * KI, "ip oop"), (16 * KI, 64 * KI, "ip oop"),
           (256 * KI, 4 * MI, "ip oop"), (25 * MI, 256 * MI, "ip"), (25 * MI, 256 * MI, "oop")]
PEERS = {  # (ranks, placement; "" is any)
    (2, "near"): [0.40, 0.50, 0.35, 0.45, 0.45, 0.38],
    (2, "far"): [0.75, 0.85, 0.30, 0.35, 0.60, 0.50],
    (4, ""): [0.60, 0.55, 0.45, 0.45, 0.45, 0.33],
    (8, ""): [0.45, 0.40, 0.40, 0.42, 0.50, 0.30],
}
# Ours / the slower of cross_read and direct2, two ranks, near: (first, last size, most).
LIMIT = [(KI, 4 * MI, 1.8), (25 * MI, 256 * MI, 0.75)]
LIMIT_REGISTERED = [(256 * KI, 256 * KI, 1.2), (MI, 256 * MI, 0.7)]
# Ours / Gloo's best.
GLOO = [(8, 4 * MI, 1 / 5), (4 * MI + 1, 256 * MI, 1 / 2.5)]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One target at one size."""
    what: str  # "best peer", "limit", "limit, registered", "gloo"
    reached: float
    target: float

    @property
    def missed(self):
        return self.reached > self.target


def peer_target(ranks, placement, size, place):
    """The most that ours may take of the best peer's time; None where nothing is demanded."""
    row = PEERS.get((ranks, placement)) or PEERS.get((ranks, ""))
    for (first, last, places), most in zip(COLUMNS, row or []):
        if first <= size <= last and place in places.split():
            return most
    return None


def in_ranges(ranges, size):
    """The target of the range that has this size, or None."""
    return next((most for first, last, most in ranges if first <= size <= last), None)


def judge(comparison):
    """The verdicts that can be given on one results.Comparison."""
    c = comparison
    candidates = [("best peer", c.ratio, peer_target(c.ranks, c.placement, c.bytes, c.place)),
                  ("gloo", c.gloo_ratio, in_ranges(GLOO, c.bytes))]
    if c.ranks == 2 and c.placement == "near" and c.limit_us:
        for what, figure, ranges in (("limit", c.ours, LIMIT),
                                     ("limit, registered", c.registered, LIMIT_REGISTERED)):
            if figure:
                candidates.append((what, figure.loop_us / c.limit_us, in_ranges(ranges, c.bytes)))
    return [Verdict(what, reached, target) for what, reached, target in candidates
            if reached is not None and target is not None]
