#!/usr/bin/env python3
"""PyTorch's own tests of torch.distributed (torch.testing._internal.distributed) on the backend ringfold:
torch_own_tests.py [NAME...]. Prints what passed, was skipped and failed, by name.

They need expecttest from PyPI, and take minutes. What they gave the last time: torch_own_tests.md.
"""
import os
import sys
import tempfile
import unittest

os.environ.setdefault("BACKEND", "ringfold")
os.environ.setdefault("WORLD_SIZE", "4")
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())
os.environ.setdefault("INIT_METHOD", "file://" + os.path.join(os.environ["TEMP_DIR"], "shared"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import ringfold.torch  # noqa: E402,F401  (in every rank: they import this file)
from torch import multiprocessing  # noqa: E402
from torch.testing._internal import common_distributed as common  # noqa: E402

for feature in ("ddp", "gpu", "subgroup", "plugin"):
    if feature in common.DistTestCases.backend_feature:
        common.DistTestCases.backend_feature[feature].add("ringfold")

from torch.testing._internal.distributed.distributed_test import (  # noqa: E402
    DistributedTest, TestDistBackend)


class TestRingfold(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        # Spawned ones would load torch anew for every test.
        self._start_processes(multiprocessing.get_context("fork").Process)


class Names(unittest.TestResult):
    """Tells each outcome as it comes."""

    def addSuccess(self, test):
        print("passed", test._testMethodName, flush=True)

    def addSkip(self, test, reason):
        print("skipped", test._testMethodName + ":", reason, flush=True)

    def addError(self, test, error):
        text = str(error[1]).strip().splitlines()
        found = [line for line in text if "Error" in line]
        print("FAILED", test._testMethodName + ":", (found or text or ["?"])[-1][:300], flush=True)
        self.failures.append(test)

    addFailure = addError


if __name__ == "__main__":
    names = sys.argv[1:] or [name for name in unittest.TestLoader().getTestCaseNames(TestRingfold)]
    result = Names()
    unittest.TestSuite(TestRingfold(name) for name in names).run(result)
    sys.exit(1 if result.failures else 0)
