"""The results for people: tables, what was missed, JSON, a picture."""
import dataclasses
import json

import results
import targets

PLACES = {"ip": "in place", "oop": "out of place"}


def size_text(size):
    """"25 MiB", or "1000 B" when no unit divides it."""
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor and size % factor == 0:
            return f"{size // factor} {unit}"
    return f"{size} B"


def number(value, digits=3):
    """Few digits, never an exponent; "-" where there is nothing."""
    if value is None:
        return "-"
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if value >= 0.01 else f"{value:.3f}"


COLUMNS = (("size", 9), ("cores", 8), ("ours", 9), ("sync", 9), ("ring", 9), ("best peer", 9),
           ("ratio", 6), ("target", 6), ("sync", 6), ("copy", 8), ("limit", 8), ("ratio", 6),
           ("  which", 0))


def table_row(comparison, at):
    """`at`: the figures of all configurations there."""
    c = comparison
    ring = at.get(("ringfold", "ring"))
    target = targets.peer_target(c.ranks, c.placement, c.bytes, c.place)
    to_limit = c.ours.loop_us / c.limit_us if c.ours and c.limit_us else None
    return (size_text(c.bytes), c.placement, number(c.ours and c.ours.loop_us),
            number(c.ours and c.ours.sync_us), number(ring and ring.loop_us), number(c.best_us),
            number(c.ratio), number(target), number(c.sync_ratio), number(c.copy_us),
            number(c.limit_us), number(to_limit),
            ("  " + "/".join(c.best) if c.best else "") + ("  (disturbed)" if c.disturbed else ""))


def worth_showing(comparisons):
    """Without placements in which only others were measured, if there is one with ours."""
    complete = {(c.ranks, c.place, c.bytes) for c in comparisons if c.ours}
    return [c for c in comparisons if c.ours or (c.ranks, c.place, c.bytes) not in complete]


def print_tables(comparisons, figures):
    """One table for each number of ranks and place."""
    print("\nMicroseconds a call, float32 sum. ours, ring, best peer: back to back; sync: started "
          "together.\nratio: ours / best peer, ours / limit. copy: every rank copies the bytes "
          "once. limit: the slower of\ncross_read and direct2 (two ranks).")
    for ranks, place in sorted({(c.ranks, c.place) for c in comparisons}):
        print(f"\n{ranks} ranks, {PLACES[place]}")
        print(" ".join(f"{title:>{width}}" for title, width in COLUMNS))
        for c in worth_showing(comparisons):
            if (c.ranks, c.place) == (ranks, place):
                cells = table_row(c, figures[c.ranks, c.bytes, c.place, c.placement])
                print(" ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, COLUMNS)))


def print_verdicts(comparisons):
    """What was reached and missed. Returns the misses as they go into the JSON."""
    missed, reached = [], 0
    for c in comparisons:
        for verdict in targets.judge(c):
            reached += not verdict.missed
            if verdict.missed:
                missed.append({"ranks": c.ranks, "bytes": c.bytes, "place": c.place,
                               "placement": c.placement, **dataclasses.asdict(verdict)})
    print(f"\nTargets: {reached} reached, {len(missed)} missed")
    for m in missed:
        print(f"  missed: {m['ranks']} ranks, {size_text(m['bytes'])} {PLACES[m['place']]}, "
              f"{m['placement']}: {m['reached']:.2f} x {m['what']}, target {m['target']:.2f}: "
              f"{m['reached'] / m['target']:.2f} times too slow")
    return missed


def write_json(file, header, rows, comparisons, missed):
    """Everything, so that it can be judged again."""
    data = {"schema": 1, **header, "rows": [dataclasses.asdict(row) for row in rows],
            "comparisons": [dataclasses.asdict(c) for c in comparisons], "missed": missed}
    with open(file, "w", encoding="utf-8") as out:
        json.dump(data, out, indent=1)
        out.write("\n")


def best_of_library(figures, library, ranks, place, placement):
    """(sizes, times) of the library's fastest configuration at each size."""
    points = []
    for (n, size, where, class_), at in figures.items():
        if (n, where, class_) == (ranks, place, placement):
            times = [figure.loop_us for name, figure in at.items() if name[0] == library]
            if times:
                points.append((size, min(times)))
    return list(zip(*sorted(points))) or [(), ()]


def draw(file, figures):
    """Time per call against size: a row for each place, a column for each number of ranks and
    placement; of every library the fastest configuration."""
    import matplotlib
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    columns = sorted({(key[0], key[3]) for key in figures})
    libraries = sorted({name[0] for at in figures.values() for name in at} - {results.LIMITS})
    picture, axes = plt.subplots(2, len(columns), figsize=(5 * len(columns), 9), squeeze=False)
    for row, place in enumerate(PLACES):
        for column, (ranks, placement) in enumerate(columns):
            at = axes[row][column]
            for library in libraries:
                sizes, times = best_of_library(figures, library, ranks, place, placement)
                at.loglog(sizes, times, marker=".", label=library,
                          linewidth=2.5 if library == results.OURS[0] else 1)
            at.set(xlabel="bytes", ylabel="time per call (us)",
                   title=f"{ranks} ranks, {placement}, {PLACES[place]}")
            at.grid(True, alpha=0.3)
    axes[0][0].legend(fontsize="small")
    picture.suptitle("all-reduce, float32 sum, one host: fastest configuration of each library")
    picture.tight_layout()
    picture.savefig(file)
