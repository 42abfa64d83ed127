#!/usr/bin/env python3
"""Ranks on several hosts, which are network namespaces: the library itself, and bench/peers/between_hosts.

hosts_test.py BUILD SOURCE
"""
import argparse
import glob
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BUILD, SOURCE = sys.argv[1:3]
PEERS = os.path.join(SOURCE, "bench", "peers")
RINGFOLD = os.path.join(BUILD, "tools", "ringfold")
sys.dont_write_bytecode = True
sys.path.insert(0, PEERS)
import hosts_report  # noqa: E402
import latency  # noqa: E402
import results  # noqa: E402
from laboratory import Laboratory, Unavailable  # noqa: E402

MI = 1 << 20


def script(name):
    """A script of bench/peers as a module."""
    loader = importlib.machinery.SourceFileLoader(name, os.path.join(PEERS, name))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(name, loader))
    loader.exec_module(module)
    return module


between_hosts = script("between_hosts")


def row(library, configuration, ranks, size, loop_us):
    return results.parse_answer(library, configuration, ranks,
                                f"{size},ip,10,1,{loop_us},3,4,0,0,0,50,50,{size}")


class Judging(unittest.TestCase):
    def test_layouts(self):
        self.assertEqual(between_hosts.parse_layout("3"), [1, 1, 1])
        self.assertEqual(between_hosts.parse_layout("3+2"), [3, 2])
        for wrong in ("1", "0", "x", "3+", "3+0", "17", "9+9", ""):
            with self.assertRaises(argparse.ArgumentTypeError, msg=wrong):
                between_hosts.parse_layout(wrong)

    def measured(self, rate, layout, *rows, latency_us=None):
        return between_hosts.Measured(layout, rate, latency_us or {}, list(rows), {}, {})

    def verdicts(self, *args, **more):
        return {v.what: (round(v.reached, 3), v.missed)
                for v in hosts_report.judge(self.measured(*args, **more))}

    def test_line_rate(self):
        # 1 MiB on 4 hosts: 1.5 MiB over each link, at 125 MB/s at least 12,583 us.
        self.assertEqual(self.verdicts("1gbit", [1] * 4, row("ringfold", "auto", 4, MI, 12900)),
                         {"of line rate": (0.975, False)})
        self.assertEqual(self.verdicts("1gbit", [1] * 4, row("ringfold", "auto", 4, MI, 13500)),
                         {"of line rate": (0.932, True)})
        # Two ranks on each of two hosts: what leaves a host leaves it once.
        self.assertEqual(self.verdicts("1gbit", [2, 2], row("ringfold", "auto", 4, MI, 8600)),
                         {"of line rate": (0.975, False)})

    def test_others(self):
        rows = (row("ringfold", "auto", 2, MI, 1000), row("gloo", "ring", 2, MI, 1400),
                row("gloo", "bcube", 2, MI, 1600))
        self.assertEqual(self.verdicts("none", [1, 1], *rows), {"of Gloo's busbw": (1.4, True)})
        rows = (row("ringfold", "auto", 4, 8, 24), row("openmpi4", "default", 4, 8, 25))
        self.assertEqual(self.verdicts("none", [1] * 4, *rows, latency_us={8: 10}),
                         {"of the least steps' latency": (1.2, True),
                          "of the best peer's time": (0.96, False)})

    def test_latency(self):
        self.assertEqual(latency.parse("+---+\n| Test |\n   3000  10.521  80.4  811.9  0.09 0.01 1 2\n"),
                         10.521)
        self.assertEqual(latency.parse("Final:  3000  7.5  8.4  8.9  0.09 0.01 1 2\n"), 7.5)
        with self.assertRaises(latency.Absent):
            latency.parse("connection refused")


def laboratories():
    """Namespaces of laboratories, this one's or another's."""
    return set(glob.glob("/run/netns/ringfold*"))


class Ranks(unittest.TestCase):
    """Real ranks on hosts; nothing is left of these."""

    def setUp(self):
        self.before = laboratories()

    def tearDown(self):
        self.assertEqual(laboratories() - self.before, set())

    @staticmethod
    def start_ranks(laboratory, arguments_of, host_of=None, command=("bench", "all_reduce"),
                    **more):
        """A command of ringfold as every rank of the laboratory. `arguments_of`: of a rank;
        `host_of`: where it is, if not block by block; `more`: environment variables."""
        ranks = []
        for rank in range(laboratory.ranks):
            settings = {"RINGFOLD_RANK": str(rank), "RINGFOLD_SIZE": str(laboratory.ranks),
                        "RINGFOLD_COORDINATOR": f"{laboratory.address(1)}:23456",
                        "RINGFOLD_SECRET": "only for this test, of no use elsewhere",
                        "RINGFOLD_TIMEOUT": "20", **more}
            ranks.append(subprocess.Popen(  # pylint: disable=consider-using-with
                [*laboratory.inside((host_of or laboratory.host_of)(rank)), RINGFOLD,
                 *command, *arguments_of(rank)], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                env={**os.environ, **settings}))
        return ranks

    def bench(self, laboratory, *arguments, host_of=None, **more):
        """All ranks with the same arguments, to a good end; rank 0's JSON."""
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "bench.json")
            ranks = self.start_ranks(laboratory, lambda rank: [*arguments, "--json", file], host_of,
                                     **more)
            outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
            if any(rank.returncode for rank in ranks):
                raise AssertionError("\n".join(outputs))
            with open(file, encoding="utf-8") as text:
                return json.load(text)


class Hosts(Ranks):
    """What must always hold."""

    def check_links(self, layout, algorithm, factor, host_of=None):
        """The bytes that leave each host are `factor` times those of a call."""
        with Laboratory(layout) as laboratory:
            every = range(1, len(layout) + 1)
            before = [laboratory.sent(host) for host in every]
            data = self.bench(laboratory, "-b", "3M", "-e", "3M", "-n", "5", "-w", "0", "-c", "0",
                              "--algorithm", algorithm, host_of=host_of)
            sent = [laboratory.sent(host) - was for host, was in zip(every, before)]
        self.assertEqual((data["ranks"], data["hosts"]), (sum(layout), len(layout)))
        result = data["results"][0]
        self.assertIn("ucx", result["transport"])
        self.assertEqual(result["algorithm"], algorithm)
        calls = 2 * (1 + 5 + 5)  # in and out of place: the first, back to back, one by one
        for one in sent:  # headers, acknowledgements, start-up
            self.assertGreater(one, calls * factor * 3 * MI)
            self.assertLess(one, 1.03 * calls * factor * 3 * MI)

    def test_each_link_carries_what_the_model_says(self):
        self.check_links([1, 1, 1], "ring", 2 * 2 / 3)

    def test_several_ranks_of_a_host_send_its_bytes_once(self):
        self.check_links([2, 2], "two_level", 2 * 1 / 2)
        self.check_links([2, 2, 2], "two_level", 2 * 2 / 3, host_of=lambda rank: rank % 3 + 1)

    def test_a_ring_crosses_each_link_once_whatever_the_numbering(self):
        # Uneven hosts, ranks dealt out in turns.
        self.check_links([3, 2], "ring", 2 * 4 / 5, host_of=lambda rank: [1, 2, 1, 2, 1][rank])

    def test_sums_are_right(self):
        for layout in ([1, 1], [3, 2], [1, 4]):
            with Laboratory(layout) as laboratory:
                data = self.bench(laboratory, "-b", "4", "-e", "1M", "-f", "64", "-n", "2", "-w", "1")
            self.assertEqual((data["ranks"], data["hosts"], data["wrong"], data["errors"]),
                             (sum(layout), len(layout), 0, []))

    def test_all_types_and_operations_host_by_host(self):
        with Laboratory([3, 2]) as laboratory:
            data = self.bench(laboratory, "-b", "128K", "-e", "129K", "-i", "1K", "-n", "1", "-w", "0",
                              "-d", "all", "-o", "all", host_of=lambda rank: [1, 2, 1, 2, 1][rank])
        self.assertEqual((data["wrong"], data["errors"]), (0, []))
        self.assertGreater(len(data["results"]), 2 * 8 * 4)
        self.assertIn("two_level", {result["algorithm"] for result in data["results"]})

    def test_a_rank_that_calls_something_else_is_told_to_all(self):
        # Rank 4 has no member of a ring on its side, so only the comparison of calls can see it.
        for odd in (4, 0):
            with Laboratory([3, 2]) as laboratory:
                start = time.monotonic()
                ranks = self.start_ranks(laboratory, lambda rank: [
                    "-b", "2M" if rank == odd else "1M", "-e", "2M", "-n", "2", "-w", "0", "-c", "0"])
                outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
                self.assertLess(time.monotonic() - start, 15)
            for output, rank in zip(outputs, ranks):
                self.assertEqual(rank.returncode, 1, output)
                self.assertRegex(output, "262144 elements")
                self.assertRegex(output, "524288 elements")

    def test_a_killed_rank_is_told_to_all(self):
        with Laboratory([3, 2]) as laboratory:
            ranks = self.start_ranks(laboratory, lambda rank: [
                "-b", "8M", "-e", "8M", "-n", "100000", "-w", "0", "-c", "0"])
            time.sleep(3)
            self.assertEqual([rank.poll() for rank in ranks], [None] * 5)
            ranks[1].kill()
            killed = time.monotonic()
            outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
            self.assertLess(time.monotonic() - killed, 3)
        for rank in (0, 2, 3, 4):
            self.assertEqual(ranks[rank].returncode, 1, outputs[rank])
            self.assertRegex(outputs[rank], "rank 1 ")

    def rails(self, laboratory, interfaces):
        """Least time of a call, and the bytes that have left the first host by each rail."""
        before = [laboratory.sent(1, rail) for rail in (0, 1)]
        data = self.bench(laboratory, "-b", "4M", "-e", "4M", "-n", "3", "-w", "1", "-c", "1",
                          RINGFOLD_INTERFACES=interfaces)
        self.assertEqual((data["wrong"], data["errors"]), (0, []))
        sent = [laboratory.sent(1, rail) - was for rail, was in zip((0, 1), before)]
        return data["results"][0]["in_place"]["min_us"], sent

    def test_rails_share_the_bytes_by_their_speed(self):
        with Laboratory([1, 1], "100mbit", rails=2) as laboratory:
            one, by_one = self.rails(laboratory, "eth0")
            both, by_both = self.rails(laboratory, "eth0,eth1")
            laboratory.shape("50mbit", 1)
            _, uneven = self.rails(laboratory, "eth0,eth1")
        self.assertLess(by_one[1], 0.01 * by_one[0])
        self.assertGreater(one / both, 1.7)
        self.assertLess(abs(by_both[0] / sum(by_both) - 1 / 2), 0.06)
        self.assertLess(abs(uneven[0] / sum(uneven) - 2 / 3), 0.08)

    def test_a_rail_that_is_set_down_ends_the_job_by_its_deadline(self):
        with Laboratory([1, 1], rails=2) as laboratory:
            ranks = self.start_ranks(
                laboratory, lambda rank: ["-b", "8M", "-e", "8M", "-n", "100000", "-w", "0", "-c", "0"],
                RINGFOLD_INTERFACES="eth0,eth1", RINGFOLD_TIMEOUT="4")
            time.sleep(3)
            self.assertEqual([rank.poll() for rank in ranks], [None] * 2)
            laboratory.netlab("set", 1, 1, "down")
            outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
        for rank in (0, 1):
            self.assertEqual(ranks[rank].returncode, 1, outputs[rank])
            self.assertRegex(outputs[rank], "timeout|lost")
            self.assertRegex(outputs[rank], "rank [01]")

    def start(self, *more):
        return subprocess.Popen(
            [os.path.join(PEERS, "between_hosts"), "--quick", "--only", "ringfold/auto", "--layouts",
             "2", "--no-build", "--build", BUILD, *more], stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_between_hosts(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "hosts.json")
            process = self.start("--rates", "1gbit", "--sizes", "1M", "--json", file)
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 0, out + err)
            with open(file, encoding="utf-8") as text:
                measured, = json.load(text)["measured"]
        self.assertEqual((measured["ranks_of_hosts"], measured["rate"], measured["failed"]),
                         ([1, 1], "1gbit", {}))
        row_, = measured["rows"]
        self.assertEqual(row_["wrong"], 0)
        self.assertGreater(row_["cpu_us"], 0)
        # The link is what it is said to be: 1 MiB cannot cross it in less, but for the burst.
        self.assertGreater(row_["loop_us"], 0.7 * MI / 125)
        self.assertIn("1+1 ranks on 2 hosts, links: 1gbit", out)

    def test_a_run_that_is_killed_leaves_nothing(self):
        for number in (signal.SIGTERM, signal.SIGKILL):
            process = self.start("--rates", "10mbit", "--sizes", "25M")
            deadline = time.monotonic() + 30
            while not laboratories() - self.before and time.monotonic() < deadline:
                time.sleep(0.02)
            self.assertTrue(laboratories() - self.before)
            time.sleep(1)  # the ranks start
            process.send_signal(number)
            process.communicate(timeout=30)
            while laboratories() - self.before and time.monotonic() < deadline:
                time.sleep(0.05)
            self.assertEqual(laboratories() - self.before, set())


class Slow(Ranks):
    """What takes longer."""

    def measure(self, laboratory, file):
        """ringfold doctor --measure; rank 0's findings, which are left in the file."""
        ranks = self.start_ranks(laboratory, lambda rank: ["--measure", "--json", file],
                                 command=("doctor",))
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        self.assertEqual([rank.returncode for rank in ranks], [0] * len(ranks), "\n".join(outputs))
        self.assertIn("RINGFOLD_MACHINE", outputs[0])
        self.assertEqual(outputs[1:], [""] * (len(ranks) - 1))
        with open(file, encoding="utf-8") as text:
            return json.load(text)

    def audit(self, laboratory, size, file):
        """bench --audit-choice at one size: the exit statuses and rank 0's lines."""
        ranks = self.start_ranks(
            laboratory, lambda rank: ["--audit-choice", "-b", size, "-e", size], RINGFOLD_MACHINE=file)
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
        return [rank.returncode for rank in ranks], outputs[0]

    def test_what_was_measured_is_what_is_predicted(self):
        with tempfile.TemporaryDirectory() as folder, Laboratory([1] * 3, "1gbit") as laboratory:
            file = os.path.join(folder, "machine.json")
            found = self.measure(laboratory, file)
            beta = found["machine"]["remote"]["beta"]
            self.assertLess(abs(beta / (8e-9 / 0.956) - 1), 0.15)
            self.assertEqual({row["algorithm"] for row in found["fit"]["remote"]},
                             {"ring", "halving_doubling", "recursive_doubling"})
            self.assertNotIn("local", found["machine"])
            data = self.bench(laboratory, "-b", "8M", "-e", "8M", "-n", "5", RINGFOLD_MACHINE=file)
            result = data["results"][0]
            self.assertLess(abs(result["model_us"] / result["in_place"]["min_us"] - 1), 0.15)
            status, told = self.audit(laboratory, "4M", file)
            self.assertEqual((status, told.count("Choices : 0 OK")), ([0] * 3, 1), told)
            self.assertIn("= ring", told)
            # Links that have no end of bandwidth: then whoever believes it chooses what is slow.
            with open(file, "w", encoding="utf-8") as text:
                json.dump({"remote": {"alpha": 1e-2, "beta": 1e-12}}, text)
            status, told = self.audit(laboratory, "4M", file)
            self.assertEqual((status[0], told.count("SLOWER THAN THE BEST")), (1, 1), told)


def can_be_had():
    """Why there can be no laboratory here, or None."""
    try:
        with Laboratory([1, 1], "1gbit"):
            return None
    except Unavailable as why:
        return str(why)


if __name__ == "__main__":
    reason = can_be_had()
    if reason:
        print(f"SKIPPED hosts: {reason}")
        del Hosts, Slow
    elif os.environ.get("RINGFOLD_TEST_SLOW") == "1":
        del Judging, Hosts
    else:
        del Slow
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
