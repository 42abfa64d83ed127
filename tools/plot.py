#!/usr/bin/env python3
"""Draws a --json file of `ringfold bench`: plot.py RESULTS.json PICTURE.svg.

With --probe it only says whether it could: exit status 3 and a sentence if matplotlib is missing.
"""
import json
import sys

try:
    import matplotlib
except ImportError:
    print("ringfold: --plot needs matplotlib: apt-get install python3-matplotlib", file=sys.stderr)
    sys.exit(3)


def curves(results):
    """Yields (label, sizes, times, bus bandwidths) for each type, operation, root and placement."""
    groups = {}
    for row in results:
        for place in ("out_of_place", "in_place"):
            if row[place]:
                label = f"{row['type']} {row['redop']} root {row['root']} {place}"
                label = label.replace(" none", "").replace(" root -1", "")
                groups.setdefault(label, []).append((row["size"], row[place]))
    for label, points in groups.items():
        points.sort(key=lambda point: point[0])
        points = [point for point in points if point[0] > 0]
        yield (label, [size for size, _ in points], [p["time_us"] for _, p in points],
               [p["busbw"] for _, p in points])


def main():
    if sys.argv[1:] == ["--probe"]:
        return
    source, target = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        data = json.load(file)
    matplotlib.use("svg")
    import matplotlib.pyplot as plt
    figure, (time, bandwidth) = plt.subplots(1, 2, figsize=(12, 5))
    for label, sizes, times, busbw in curves(data["results"]):
        time.loglog(sizes, times, marker=".", label=label)
        if None not in busbw:
            bandwidth.semilogx(sizes, busbw, marker=".", label=label)
    time.set(xlabel="bytes", ylabel="time per call (us)")
    bandwidth.set(xlabel="bytes", ylabel="bus bandwidth (GB/s)")
    time.legend(fontsize="small")
    name = data["results"][0]["collective"] if data["results"] else ""
    figure.suptitle(f"{name}, {data['ranks']} ranks, {data['device']} memory")
    figure.tight_layout()
    figure.savefig(target)


main()
