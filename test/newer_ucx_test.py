#!/usr/bin/env python3
"""Tests that use UCX, with the newest UCX from PyPI in the place of the system's.

newer_ucx_test.py BUILD SOURCE
"""
import glob
import json
import os
import subprocess
import sys
import tempfile
import unittest

BUILD, SOURCE = sys.argv[1:3]
WHEEL = os.path.join(BUILD, "peers-wheels", "ucx")
LIBRARIES = glob.glob(os.path.join(WHEEL, "lib", "python3*", "site-packages", "libucx", "lib"))
BETWEEN_HOSTS = ["test_sums_are_right", "test_each_link_carries_what_the_model_says",
                 "test_rails_share_the_bytes_by_their_speed", "test_a_killed_rank_is_told_to_all"]


class NewerUcx(unittest.TestCase):
    def run_with_it(self, *command):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, timeout=180, check=False,
                              env={**os.environ, "LD_LIBRARY_PATH": LIBRARIES[0]})
        self.assertEqual(done.returncode, 0, done.stdout[-4000:])
        return done.stdout

    def test_it_is_the_one(self):
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "doctor.json")
            self.run_with_it(os.path.join(BUILD, "tools", "ringfold"), "doctor", "--json", file)
            with open(file, encoding="utf-8") as text:
                self.assertRegex(json.load(text)["ucx"]["version"], r"^1\.2[2-9]")

    def test_transport(self):
        for name in ("ucx_test", "transport_test", "transport_wait_test"):
            self.run_with_it(os.path.join(BUILD, "test", name))

    def test_between_hosts(self):
        told = self.run_with_it("python3", os.path.join(SOURCE, "test", "hosts_test.py"), BUILD, SOURCE,
                                *(f"Hosts.{name}" for name in BETWEEN_HOSTS))
        if "SKIPPED" in told:
            self.skipTest(told.strip())


if __name__ == "__main__":
    if not os.path.exists(os.path.join(WHEEL, "complete")) or not LIBRARIES:
        print("SKIPPED newer_ucx: UCX 1.22 is not here; bench/peers/between_hosts --install brings it")
        sys.exit(0)
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
