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


def block(readme, language):
    """The one code block of this language."""
    found = re.findall(rf"```{language}\n(.*?)```", readme, re.S)
    if len(found) != 1:
        sys.exit(f"README.md: expected one block of {language}, found {len(found)}")
    return found[0]


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
        for language, compiler, suffix in (("cpp", ["g++", "-std=c++20"], "cpp"),
                                           ("c", ["gcc", "-std=c99"], "c")):
            name = os.path.join(folder, "program_" + language)
            with open(f"{name}.{suffix}", "w", encoding="utf-8") as file:
                file.write(block(readme, language))
            run(compiler + ["-Wall", "-Wextra", "-Werror", f"{name}.{suffix}", "-o", name] + flags)
            output = run([os.path.join(prefix, "bin", "ringfold"), "run", "--ranks", "3", "--", name],
                         env=environment)
            lines = output.splitlines()
            right = len(lines) == 3 and all(line.endswith("1 10 100") for line in lines)
            print(f"{language}: {'as expected' if right else 'WRONG'}\n{output}", end="")
            if not right:
                sys.exit(1)


main()
