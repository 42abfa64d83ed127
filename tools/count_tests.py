#!/usr/bin/env python3
"""Runs the tests of a build folder and counts test cases: count_tests.py BUILD [NAME...].

Each program of `meson test` runs by itself. A Catch2 program reports its test cases as XML into a
file, so that whatever a test prints cannot disturb the count; one that crashes, hangs or reports
nothing counts as one failure. A line "SKIPPED name: reason" on stdout makes that case a skipped one.
A program of meson's suite "plain" is no Catch2 program: it passes with exit status 0.
"""
import json
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree


def tests_of(build, names):
    listing = subprocess.run(["meson", "introspect", build, "--tests"], check=True,
                             stdout=subprocess.PIPE, text=True)
    tests = json.loads(listing.stdout)
    known = [test["name"] for test in tests]
    unknown = [name for name in names if name not in known]
    if unknown:
        print(f"no such test: {', '.join(unknown)}; there are: {', '.join(known)}",
              file=sys.stderr)
        print("0 passed, 1 failed, 0 skipped")
        sys.exit(2)
    return [test for test in tests if not names or test["name"] in names]


def take_interrupts():
    """In a child: Ctrl-C ends programs, which tests rely on, also where this was started in the
    background, with interrupts ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(command, environment, folder, seconds):
    """Runs to the end or the limit; returns (status, output). A time-out ends the whole group."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, env=environment, cwd=folder, stdin=subprocess.DEVNULL,
                                   stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                                   preexec_fn=take_interrupts)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = f"no end after {seconds} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


def cases_in(report):
    """(name, passed) of every test case; None if the report is missing or unfinished."""
    try:
        root = ElementTree.parse(report).getroot()
    except (ElementTree.ParseError, FileNotFoundError):
        return None
    return [(case.get("name"), case.find("OverallResult").get("success") == "true")
            for case in root.iter("TestCase")]


def skipped_in(output, cases):
    """{name: reason} of the cases that say so. A name may itself contain ": "."""
    skipped = {}
    for line in output.splitlines():
        for name, _ in cases:
            if line.startswith(f"SKIPPED {name}: "):
                skipped[name] = line[len(f"SKIPPED {name}: "):]
    return skipped


def run_test(test, build, factor):
    """Runs one program; returns (passed, failed, {skipped: reason}) and prints what failed."""
    environment = dict(os.environ, **test["env"])
    plain = any(suite.endswith("plain") for suite in test["suite"])
    with tempfile.TemporaryDirectory() as folder:
        report = os.path.join(folder, "report.xml")
        command = test["cmd"] + ([] if plain else ["--reporter", "xml", "--out", report])
        status, output = run(command, environment, test["workdir"] or build,
                             test["timeout"] * factor)
        cases = [(test["name"], status == 0)] if plain else cases_in(report)
        if cases is None:
            print(f"FAILED {test['name']}: {status}, no report\n{output}")
            return 0, 1, {}
        failed = [name for name, passed in cases if not passed]
        skipped = {name: why for name, why in skipped_in(output, cases).items()
                   if name not in failed}
        passed = [name for name, _ in cases if name not in failed and name not in skipped]
        for name in failed:
            print(f"FAILED {test['name']}: {name}")
        broken = status != 0 and not failed  # for example a leak found at the end
        if broken:
            print(f"FAILED {test['name']}: ends with status {status}")
        if failed or broken:
            print(output)
        if failed and not plain:
            with open(report, encoding="utf-8") as file:
                print(file.read())
        return len(passed), len(failed) + broken, skipped


def main():
    build, names = sys.argv[1], sys.argv[2:]
    factor = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
    passed = failed = 0
    skipped = []
    for test in tests_of(build, names):
        more_passed, more_failed, more_skipped = run_test(test, build, factor)
        print(f"{test['name']}: {more_passed} passed, {more_failed} failed, "
              f"{len(more_skipped)} skipped", flush=True)
        passed += more_passed
        failed += more_failed
        skipped += [(test["name"], name, why) for name, why in more_skipped.items()]
    for program, name, why in skipped:
        print(f"SKIPPED {program}: {name}: {why}")
    print(f"{passed} passed, {failed} failed, {len(skipped)} skipped")
    sys.exit(0 if failed == 0 else 1)


main()
