"""One run: the programs of all configurations take turns at every size."""
import argparse
import collections
import datetime
import sys
import time

import report
import results
import running

KI, MI = 1 << 10, 1 << 20
ATTEMPTS = 3  # at a measurement that was disturbed
MORE_ROUNDS = 2  # for those who missed the placement in which the others were measured


def parse_size(text):
    """"64", "64K", "25M"."""
    factor = {"K": KI, "M": MI}.get(text[-1:].upper(), 1)
    try:
        size = int(text[:-1] if factor > 1 else text) * factor
    except ValueError:
        size = 0
    if size < 4 or size % 4:
        raise argparse.ArgumentTypeError(f'"{text}"; accepted: bytes of whole floats: 8, 64K, 25M')
    return size


def utc_now():
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


class Session:
    """What is measured, and what has come of it so far. `quick`: less often."""

    def __init__(self, wanted, sizes, places, rounds, quick):
        self.wanted, self.sizes, self.places = wanted, sizes, places
        self.rounds = rounds or (1 if quick else 3)
        self.budget_us = 30e3 if quick else 100e3
        self.repetitions = 9 if quick else 15  # where calls are quick; at least 3
        self.patience = 30 if quick else 600  # seconds for repetitions
        self.rows, self.failed, self.started = [], {}, time.monotonic()

    def say(self, text):
        print(f"{time.monotonic() - self.started:6.0f} s  {text}", file=sys.stderr, flush=True)

    def run(self, ranks, workplace):
        """All sizes with so many ranks."""
        programs = {}
        try:
            for configuration in self.wanted:
                if configuration.ranks in (0, ranks):
                    self.attempt(programs, configuration, lambda c=configuration:
                                 running.Program(c, ranks, workplace))
            self.say(f"{ranks} ranks: {len(programs)} programs are there")
            for size in self.sizes:
                for place in self.places:
                    self.block(programs, ranks, size, place)
                self.say(f"{ranks} ranks: {report.size_text(size)}")
        finally:
            for program in programs.values():
                program.close()

    def attempt(self, programs, configuration, start):
        """Adds what `start` gives to the programs, or the reason to what has failed."""
        try:
            programs[configuration] = start()
        except running.Failed as why:
            self.failed[configuration.title] = str(why)
            self.say(f"FAILED {configuration.title}: {why}")

    def block(self, programs, ranks, size, place):
        """Everybody at one size, until all have a figure in one placement of the cores."""
        seen = collections.defaultdict(set)  # placement: configurations
        for turn in range(self.rounds + MORE_ROUNDS):
            if turn >= self.rounds and self.patience < 0:
                break
            everybody = [c for c in programs if self.takes_part(c, place)]
            most = max(seen.values(), key=len, default=set())
            missing = [c for c in everybody if turn < self.rounds or c not in most]
            for configuration in missing:
                row = self.measure(programs, configuration, ranks, size, place,
                                   again=turn >= self.rounds)
                if row:
                    self.rows.append(row)
                    seen[row.placement].add(configuration)

    @staticmethod
    def takes_part(configuration, place):
        """Two libraries have but one form."""
        name = (configuration.library, configuration.name)
        if name == ("gloo", "halving_doubling"):
            return place == "ip"
        return name[0] != results.LIMITS or place == "oop"

    def measure(self, programs, configuration, ranks, size, place, again):
        """The least disturbed of a few attempts; None if the program failed."""
        best = None
        for attempt in range(ATTEMPTS):
            start = time.monotonic()
            try:
                answer = programs[configuration].measure(size, place, self.budget_us,
                                                         self.repetitions)
                row = results.parse_answer(configuration.library, configuration.name, ranks, answer)
                if row.wrong:
                    raise running.Failed(f"{row.wrong} wrong elements at {size} B {place}")
            except (running.Failed, ValueError) as why:
                self.say(f"FAILED {configuration.title}: {why}")
                self.failed[configuration.title] = str(why)
                programs.pop(configuration).close()
                return None
            if best is None or row.disturbance < best.disturbance:
                best = row
            self.patience -= time.monotonic() - start if attempt or again else 0
            if not best.disturbed or self.patience < 0:
                break
        return best
