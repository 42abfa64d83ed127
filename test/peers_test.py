#!/usr/bin/env python3
"""bench/peers: its parsing and judging on made-up figures, and one short run of compare.

peers_test.py BUILD SOURCE
"""
import glob
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BUILD, SOURCE = sys.argv[1:3]
PEERS = os.path.join(SOURCE, "bench", "peers")
sys.dont_write_bytecode = True
sys.path.insert(0, PEERS)
import report  # noqa: E402
import results  # noqa: E402
import running  # noqa: E402
import targets  # noqa: E402

KI, MI = 1 << 10, 1 << 20
# library, configuration, ranks, then a program's answer
CSV = """
ringfold auto 2 1024,oop,1000,0.9,1.0,1.1,1.2,0,0.5,0.0,50.0,52.0,7.5
ringfold auto 2 1024,oop,1000,0.9,3.0,1.1,3.2,0,0.5,0.0,50.0,52.0,7.5
ringfold auto 2 1024,oop,1000,0.9,2.0,1.1,2.2,0,0.5,0.0,50.0,52.0,7.5
ringfold auto 2 1024,oop,1000,0.9,99.0,1.1,99.0,0,50.5,0.0,50.0,52.0,7.5
ringfold auto 2 1024,oop,1000,0.9,8.0,1.1,8.0,0,0.0,0.0,240.0,250.0,7.5
ringfold ring 2 1024,oop,1000,0.9,9.0,1.1,9.0,0,0.0,0.0,50.0,50.0,7.5
mpich5 default 2 1024,oop,1000,0.9,5.0,1.1,4.0,0,0.0,0.0,50.0,50.0,7.5
mpich5 yield 2 1024,oop,1000,0.9,4.5,1.1,9.0,0,0.0,0.0,50.0,50.0,7.5
gloo ring 2 1024,oop,1000,0.9,20.0,1.1,20.0,0,0.0,0.0,50.0,50.0,7.5
limits memcpy 2 1024,oop,1000,0.9,0.1,1.1,0.1,0,0.0,0.0,50.0,50.0,7.5
limits cross_read 2 1024,oop,1000,0.9,0.8,1.1,0.9,0,0.0,0.0,50.0,50.0,7.5
limits direct2 2 1024,oop,1000,0.9,0.5,1.1,0.6,0,0.0,0.0,50.0,50.0,7.5
mpich5 default 2 1024,ip,1000,0.9,4.0,1.1,4.0,0,0.0,0.0,50.0,245.0,7.5
"""


def parse(text):
    rows = []
    for line in text.strip().splitlines():
        library, configuration, ranks, answer = line.split(" ")
        rows.append(results.parse_answer(library, configuration, int(ranks), answer + "\n"))
    return rows


class Parsing(unittest.TestCase):
    def test_an_answer_becomes_a_row(self):
        row = results.parse_answer("mpich5", "default", 4,
                                   "1024,ip,10,1,2.5,3,4.5,0,0.25,0.5,50,60,9\n")
        self.assertEqual((row.name, row.ranks, row.bytes, row.place),
                         (("mpich5", "default"), 4, 1024, "ip"))
        self.assertEqual((row.loop_us, row.sync_us, row.wrong, row.disturbance, row.cpu_us),
                         (2.5, 4.5, 0, 0.75, 9))

    def test_rubbish_is_refused(self):
        for line in ("", "1024,ip,10,1,2,3,4,0,0,0,50,60", "1024,ip,x,1,2,3,4,0,0,0,50,60,1",
                     "Segmentation fault", "1024,ip,10,1,2,3,4,0,0,0,50,60,70,80"):
            with self.assertRaises(ValueError, msg=line):
                results.parse_answer("l", "c", 2, line)

    def test_placement(self):
        def row(before, after):
            return results.parse_answer("l", "c", 2, f"8,ip,1,1,1,1,1,0,0,0,{before},{after},1")
        self.assertEqual(row(50, 60).placement, "near")
        self.assertEqual(row(240, 250).placement, "far")
        self.assertEqual(row(0, 0).placement, "one core")
        self.assertTrue(row(50, 245).disturbed)
        self.assertTrue(row(245, 50).disturbed)
        self.assertFalse(row(245, 230).disturbed)


class Comparing(unittest.TestCase):
    def setUp(self):
        self.by = {(c.place, c.placement): c for c in results.compare(parse(CSV))}

    def test_medians_within_one_placement_without_the_disturbed(self):
        near = self.by["oop", "near"]
        self.assertEqual((near.ours.loop_us, near.ours.sync_us), (2.0, 2.2))
        self.assertFalse(near.disturbed)
        far = self.by["oop", "far"]
        self.assertEqual((far.ours.loop_us, far.best, far.ratio), (8.0, None, None))

    def test_ratios(self):
        near = self.by["oop", "near"]
        self.assertEqual(near.best, ("mpich5", "yield"))  # neither our ring nor a limit
        self.assertAlmostEqual(near.ratio, 2.0 / 4.5)
        self.assertAlmostEqual(near.sync_ratio, 2.2 / 4.0)  # that peer is another
        self.assertAlmostEqual(near.gloo_ratio, 0.1)
        self.assertEqual((near.copy_us, near.limit_us), (0.1, 0.8))

    def test_what_is_missing_stays_empty(self):
        ip = self.by["ip", "far"]
        self.assertIsNone(ip.ours)
        self.assertIsNone(ip.ratio)
        self.assertIsNone(ip.limit_us)
        self.assertTrue(ip.disturbed)
        self.assertEqual(targets.judge(ip), [])


class Judging(unittest.TestCase):
    def test_targets(self):
        for expected, question in ((0.40, (2, "near", 8, "ip")), (0.75, (2, "far", 64, "oop")),
                                   (None, (2, "near", 128, "ip")), (0.50, (2, "near", KI, "ip")),
                                   (0.45, (2, "near", 25 * MI, "ip")),
                                   (0.38, (2, "near", 25 * MI, "oop")),
                                   (0.50, (2, "far", 256 * MI, "oop")),
                                   (0.45, (4, "near", 64 * KI, "ip")),
                                   (0.33, (4, "far", 64 * MI, "oop")),
                                   (0.42, (8, "one core", MI, "ip")), (None, (3, "near", 8, "ip"))):
            self.assertEqual(targets.peer_target(*question), expected, question)

    def test_verdicts(self):
        near = next(c for c in results.compare(parse(CSV)) if (c.place, c.placement) == ("oop", "near"))
        verdicts = {v.what: v for v in targets.judge(near)}
        self.assertEqual(set(verdicts), {"best peer", "gloo", "limit"})
        self.assertFalse(verdicts["best peer"].missed)  # 0.44 of at most 0.50
        self.assertFalse(verdicts["gloo"].missed)
        self.assertTrue(verdicts["limit"].missed)  # 2.5 times, 1.8 allowed
        self.assertAlmostEqual(verdicts["limit"].reached, 2.5)

    def test_registered_buffers_have_targets_of_their_own(self):
        rows = parse(CSV.replace("1024,", f"{MI},").replace("ringfold ring", "ringfold registered"))
        near = next(c for c in results.compare(rows) if (c.place, c.placement) == ("oop", "near"))
        verdict = {v.what: v for v in targets.judge(near)}["limit, registered"]
        self.assertEqual((verdict.target, verdict.missed), (0.7, True))

    def test_numbers_are_readable(self):
        self.assertEqual([report.number(x) for x in (None, 0.0042, 0.0561, 12.34, 12345.6)],
                         ["-", "0.004", "0.0561", "12.3", "12,346"])
        self.assertEqual([report.size_text(x) for x in (8, KI, 25 * MI, 1028)],
                         ["8 B", "1 KiB", "25 MiB", "1028 B"])


def leftovers():
    """What a run could leave behind: its folder and names in /dev/shm."""
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "ringfold-peers-*"))) | set(
        running.Workplace.remains())


def programs_alive():
    """Ranks of a run that are still there."""
    alive = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = pathlib.Path(path).read_bytes().split(b"\0")
        except OSError:
            continue
        if words[0].endswith(b"/peers_ringfold") and words[0].startswith(BUILD.encode()):
            alive.append(path)
    return alive


def eventually(true, seconds=20):
    """Whether `true` becomes so in time."""
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.02)
    return true()


class Running(unittest.TestCase):
    """The whole of it, with ringfold alone."""

    def setUp(self):
        self.before = leftovers()

    def tearDown(self):
        self.assertEqual(leftovers() - self.before, set())
        self.assertEqual(programs_alive(), [])

    @staticmethod
    def start(*more, only="ringfold/auto,ringfold/ring", **options):
        return subprocess.Popen(
            [os.path.join(PEERS, "compare"), "--quick", "--only", only, "--ranks", "2",
             "--no-build", "--build", BUILD, *more], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)

    def test_end_to_end(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "results.json")
            process = self.start("--max-size", "1M", "--json", file, only="ringfold")
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, out + err)
            with open(file, encoding="utf-8") as text:
                data = json.load(text)
        measured = {(row["bytes"], row["place"], row["configuration"]) for row in data["rows"]}
        self.assertEqual(measured, {(size, place, configuration)
                                    for size in (8, KI, 16 * KI, 256 * KI)
                                    for place in ("ip", "oop")
                                    for configuration in ("auto", "ring", "registered")})
        for row in data["rows"]:
            self.assertGreater(row["loop_us"], 0)
            self.assertGreater(row["sync_us"], 0)
            self.assertGreaterEqual(row["loop_us"], row["loop_min_us"])
        self.assertEqual(data["failed"], {})
        self.assertIn("2 ranks, in place", out)

    def test_a_run_that_is_ended_leaves_nothing(self):
        for number, status in ((signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGINT, 130),
                               (signal.SIGKILL, -signal.SIGKILL)):
            process = self.start("--sizes", "256M")
            self.assertTrue(eventually(programs_alive))
            process.send_signal(number)
            process.communicate(timeout=40)
            self.assertEqual(process.returncode, status)
            self.assertTrue(eventually(lambda: not programs_alive()))
            self.assertTrue(eventually(lambda: not leftovers() - self.before))

    def test_a_dead_rank_is_a_failure_with_its_reason(self):
        process = self.start("--sizes", "16M")
        self.assertTrue(eventually(lambda: len(programs_alive()) == 4))
        victim = int(programs_alive()[0].split("/")[2])
        os.kill(victim, signal.SIGKILL)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 1, out + err)
        self.assertRegex(out, r"FAILED ringfold/(auto|ring): ")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
