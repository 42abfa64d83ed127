#!/usr/bin/env python3
"""Lists the functions that NCCL's headers declare: nccl_symbols.py [VERSION=]INCLUDE_FOLDER...

Prints "name version" for every host function of nccl.h and nccl_device/*.h, with the first version
among the given ones that declares it. That is how lib/adapters/nccl_symbols.txt is made; the folders
are the include/ of NCCL's packages (PyPI: nvidia-nccl-cu13), or of its source at each tag, where the
header does not know its version yet and it is given as VERSION=.
"""
import pathlib
import re
import sys

PUBLIC = re.compile(r"^\s*(?:ncclResult_t|const char\s*\*|void)\s+(nccl\w+)\s*\(", flags=re.M)
DEVICE = re.compile(r"NCCL_EXTERN_C\s+(?:__host__\s+)?(?!NCCL_\w*INLINE)[\w ]+?\*?\s*\b(nccl\w+)\s*\(")


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)


def functions(folder):
    """Names that the headers in this folder declare for the host."""
    public = without_comments((folder / "nccl.h").read_text(encoding="utf-8"))
    names = set(PUBLIC.findall(public))
    for header in sorted(folder.glob("nccl_device/*.h")):
        names |= set(DEVICE.findall(without_comments(header.read_text(encoding="utf-8"))))
    return names


def version_of(folder):
    text = (folder / "nccl.h").read_text(encoding="utf-8")
    numbers = [re.search(rf"^#define NCCL_{part} (\d+)", text, flags=re.M)
               for part in ("MAJOR", "MINOR", "PATCH")]
    if None in numbers:
        sys.exit(f"{folder}/nccl.h does not say its version: give VERSION={folder}")
    return ".".join(number.group(1) for number in numbers)


def since(folders):
    """{name: first version} of (version, folder) pairs."""
    first = {}
    for version, folder in sorted(folders, key=lambda pair: [int(n) for n in pair[0].split(".")]):
        for name in functions(folder):
            first.setdefault(name, version)
    return first


def main():
    folders = []
    for argument in sys.argv[1:]:
        version, equals, path = argument.rpartition("=")
        folder = pathlib.Path(path)
        folders.append((version if equals else version_of(folder), folder))
    if not folders:
        sys.exit(__doc__)
    for name, version in sorted(since(folders).items()):
        print(name, version)


if __name__ == "__main__":
    main()
