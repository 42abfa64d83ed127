#!/usr/bin/env python3
"""tools/gpu_check itself, on the emulated driver and a build that is there: gpu_check_test.py BUILD SOURCE."""
import json
import os
import subprocess
import sys
import tempfile

FEW = "cuda_cases"


def run(build, source, *options):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "results.json")
        done = subprocess.run([os.path.join(source, "tools", "gpu_check"), "--emulated", "--built", build,
                               *options, "--json", file], capture_output=True, text=True,
                              env={**os.environ, "RINGFOLD_TEST_PYTHON": "/bin/false"})  # torch is slow
        with open(file, encoding="utf-8") as results:
            return done.returncode, done.stdout, json.load(results)


def main():
    build, source = sys.argv[1:]
    # Without the comparison with NCCL, whose half for ours is a test of its own.
    status, output, results = run(build, source, "--programs", FEW, "--parts", "tests,kernels,sweep,ddp,sanitizer")
    assert status == 0, output
    passed = results["passed"]
    assert sum(name.startswith(FEW) for name in passed) >= 4, passed
    for name in ["kernels", "2 ranks as processes", *(f"sweep, {n} ranks as threads" for n in (1, 2, 4))]:
        assert name in passed, (name, output)
    assert results["failed"] == {} and results["emulated"] is True
    assert "ddp" not in passed and all("emulated" in why for name, why in results["skipped"].items()
                                       if name.startswith("compute-sanitizer"))
    for rows in results["all_reduce_on_one_device"].values():
        assert len(rows) == 4 and all(row["wrong"] == 0 and row["in_place_us"] > 0 for row in rows), rows
    assert results["figures"]["command_round_trip"]["median_seconds"] > 0
    assert set(results["figures"]["kernels"]["sum"]) >= {"f32", "bf16", "f8e4m3"}

    # What fails is told, and fails the whole.
    status, output, results = run(build, source, "--programs", "no_such", "--parts", "tests")
    assert status == 1 and "no_such" in results["failed"], output
    print("all well")


if __name__ == "__main__":
    main()
