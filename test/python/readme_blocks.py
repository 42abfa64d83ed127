"""The README's Python programs, exactly as printed."""
import os
import re

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def block(word):
    """The one Python block that says `word`."""
    with open(os.path.join(ROOT, "README.md"), encoding="utf-8") as file:
        found = [text for text in re.findall(r"```python\n(.*?)```", file.read(), re.S) if word in text]
    assert len(found) == 1
    return found[0]
