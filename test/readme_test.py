#!/usr/bin/env python3
"""The README's programs, exactly as printed: installed, compiled by pkg-config, run on three ranks.

readme_test.py BUILD SOURCE
"""
import os
import re
import subprocess
import sys
import tempfile


def run(command, **options):
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=100, check=False, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def blocks(readme, language, expected):
    """The code blocks of this language; so many are expected."""
    found = re.findall(rf"```{language}\n(.*?)```", readme, re.S)
    if len(found) != expected:
        sys.exit(f"README.md: expected {expected} blocks of {language}, found {len(found)}")
    return found


def main():
    build, source = sys.argv[1:]
    with open(os.path.join(source, "README.md"), encoding="utf-8") as file:
        readme = file.read()
    with tempfile.TemporaryDirectory() as folder:
        run(["meson", "install", "-C", build, "--no-rebuild", "--quiet", "--destdir", folder])
        prefix = folder + run(["meson", "introspect", build, "--buildoptions"]).split(
            '"name": "prefix"')[1].split('"value": "')[1].split('"')[0]
        configs = [path for path, _, files in os.walk(folder) if "ringfold.pc" in files]
        environment = dict(os.environ, PKG_CONFIG_PATH=configs[0],
                           LD_LIBRARY_PATH=os.path.dirname(configs[0]))
        flags = run(["pkg-config", f"--define-variable=prefix={prefix}", "--cflags", "--libs",
                     "ringfold"], env=environment).split()
        cpp = [(text, "cpp", ["g++", "-std=c++20"]) for text in blocks(readme, "cpp", 2)]
        c = [(text, "c", ["gcc", "-std=c99"]) for text in blocks(readme, "c", 1)]
        for number, (text, language, compiler) in enumerate(cpp + c):
            name = os.path.join(folder, f"program_{number}")
            with open(f"{name}.{language}", "w", encoding="utf-8") as file:
                file.write(text)
            run(compiler + ["-Wall", "-Wextra", "-Werror", f"{name}.{language}", "-o", name] + flags)
            output = run([os.path.join(prefix, "bin", "ringfold"), "run", "--ranks", "3", "--", name],
                         env=environment)
            lines = output.splitlines()
            right = len(lines) == 3 and all(line.endswith("1 10 100") for line in lines)
            print(f"{language}: {'as expected' if right else 'WRONG'}\n{output}", end="")
            if not right:
                sys.exit(1)


main()
