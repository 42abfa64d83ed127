"""What was measured between hosts, for people: tables, verdicts, JSON, a picture."""
import dataclasses
import json
import math

import results
from report import number, size_text

MI = 1 << 20
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
LINE_RATE = 0.95  # of it, from LINE_RATE_FROM on
LINE_RATE_FROM = MI
UNSHAPED_GLOO = 1.5  # times its busbw, where links are as fast as they go
LATENCY = 1.15  # times steps * one way


def bytes_per_second(rate):
    """Of "1gbit"; None where nothing is shaped."""
    for unit, factor in UNITS.items():
        if rate.endswith(unit):
            return float(rate[:-len(unit)]) * factor / 8
    return None


def figures(measured):
    """{bytes: {(library, configuration): median Row}}"""
    sizes = {}
    for row in measured.rows:
        sizes.setdefault(row.bytes, {}).setdefault(row.name, []).append(row)
    return {size: {name: sorted(rows, key=lambda row: row.loop_us)[len(rows) // 2]
                   for name, rows in at.items()} for size, at in sorted(sizes.items())}


def busbw(row):
    """Bytes a second through each link, if every rank has one of its own."""
    return 2 * (row.ranks - 1) / row.ranks * row.bytes / (row.loop_us * 1e-6)


def link_share(measured, row):
    """Part of the line rate that a host's link carries; hosts with several ranks send what leaves
    them once: 2(H-1)/H of the bytes."""
    hosts = len(measured.layout)
    return 2 * (hosts - 1) / hosts * row.bytes / (row.loop_us * 1e-6) / bytes_per_second(measured.rate)


def title(measured):
    ranks = "+".join(map(str, measured.layout))
    return f"{ranks} ranks on {len(measured.layout)} hosts, links: {measured.rate}"


def print_table(measured):
    """A line for each configuration and size."""
    shaped = bytes_per_second(measured.rate) is not None
    print(f"\n{title(measured)}; float32 sum in place, back to back")
    print(f"{'size':>9} {'us':>10} {'busbw GB/s':>11} {'of line':>8} {'cpu s/GB':>9}  which")
    for size, at in figures(measured).items():
        for name, row in sorted(at.items(), key=lambda item: item[1].loop_us):
            share = f"{100 * link_share(measured, row):.1f} %" if shaped else "-"
            print(f"{size_text(size):>9} {number(row.loop_us):>10} {busbw(row) / 1e9:>11.4f} "
                  f"{share:>8} {number(row.cpu_us * 1e3 / size):>9}  {'/'.join(name)}")
    for size, one_way in measured.latency_us.items():
        print(f"UCX one way, {size_text(size)}: {one_way:.1f} us")
    for kind, reasons in (("FAILED", measured.failed), ("skipped", measured.skipped)):
        for name, why in reasons.items():
            print(f"{kind} {name}: {why}")


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One target: `reached` is at least (or, of times, at most) `target` or missed."""
    where: str
    what: str
    reached: float
    target: float
    at_most: bool

    @property
    def missed(self):
        return self.reached > self.target if self.at_most else self.reached < self.target


def judge(measured):
    """The verdicts on one layout at one rate."""
    for size, at in figures(measured).items():
        ours = at.get(results.OURS)
        if ours is None:
            continue
        where = f"{title(measured)}, {size_text(size)}"
        peers = [row for name, row in at.items() if name[0] != results.OURS[0]]
        gloo = [busbw(row) for row in peers if row.library == "gloo"]
        if bytes_per_second(measured.rate) and size >= LINE_RATE_FROM:
            yield Verdict(where, "of line rate", link_share(measured, ours), LINE_RATE, False)
        elif gloo and size >= LINE_RATE_FROM:
            yield Verdict(where, "of Gloo's busbw", busbw(ours) / max(gloo), UNSHAPED_GLOO, False)
        if size in measured.latency_us:
            least = math.ceil(math.log2(ours.ranks)) * measured.latency_us[size]
            yield Verdict(where, "of the least steps' latency", ours.loop_us / least, LATENCY, True)
            if peers:
                best = min(row.loop_us for row in peers)
                yield Verdict(where, "of the best peer's time", ours.loop_us / best, 1, True)


def print_verdicts(everything):
    """What was reached and missed. Returns the misses as they go into the JSON."""
    verdicts = [verdict for measured in everything for verdict in judge(measured)]
    missed = [verdict for verdict in verdicts if verdict.missed]
    print(f"\nTargets: {len(verdicts) - len(missed)} reached, {len(missed)} missed")
    for verdict in missed:
        print(f"  missed: {verdict.where}: {verdict.reached:.3f} {verdict.what}, "
              f"target {'at most' if verdict.at_most else 'at least'} {verdict.target:.2f}")
    return [dataclasses.asdict(verdict) for verdict in missed]


def write_json(file, started, everything, missed):
    """Everything, so that it can be judged again."""
    data = {"schema": 1, "started": started, "missed": missed,
            "measured": [{"ranks_of_hosts": m.layout, "rate": m.rate, "latency_us": m.latency_us,
                          "failed": m.failed, "skipped": m.skipped,
                          "rows": [dataclasses.asdict(row) for row in m.rows]} for m in everything]}
    with open(file, "w", encoding="utf-8") as out:
        json.dump(data, out, indent=1)
        out.write("\n")


def draw(file, everything):
    """Bus bandwidth against size, one picture for each layout and rate."""
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    picture, axes = plt.subplots(1, len(everything), figsize=(5 * len(everything), 4.5), squeeze=False)
    for at, measured in zip(axes[0], everything):
        by_size = figures(measured)
        for name in sorted({name for rows in by_size.values() for name in rows}):
            points = [(size, busbw(rows[name]) / 1e9) for size, rows in by_size.items() if name in rows]
            at.loglog(*zip(*points), marker=".", label="/".join(name),
                      linewidth=2.5 if name == results.OURS else 1)
        if bytes_per_second(measured.rate):
            at.axhline(bytes_per_second(measured.rate) / 1e9, color="gray", linestyle=":")
        at.set(xlabel="bytes", ylabel="busbw (GB/s)", title=title(measured))
        at.grid(True, alpha=0.3)
    axes[0][0].legend(fontsize="small")
    picture.tight_layout()
    picture.savefig(file)
