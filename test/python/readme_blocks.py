"""The README's Python programs, exactly as printed."""
import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def block(word):
    """The one Python block that says `word`."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        found = [text for text in re.findall(r"```python\n(.*?)```", file.read(), re.S) if word in text]
    assert len(found) == 1
    return found[0]


def told_by_ranks(folder, word, ranks):
    """The lines that so many ranks of that program print, in any order."""
    program = folder / "program.py"
    program.write_text(block(word))
    done = subprocess.run([os.environ["RINGFOLD_TEST_TOOL"], "run", "--ranks", str(ranks), "--no-prefix",
                           "--", sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
