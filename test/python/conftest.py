"""Nothing may hang: a test that takes too long ends the run, with the stacks of its threads."""
import faulthandler
import os

import pytest

LIMIT = 120  # seconds for one test


@pytest.fixture(autouse=True)
def limit(request):
    seconds = (8 if "torch" in request.path.name else 1) * LIMIT  # torch loads slowly
    factor = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
    faulthandler.dump_traceback_later(seconds * factor, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session", autouse=True)
def backend(request):
    """Compiled before ranks, which have less time, ask for it."""
    if any("torch" in item.path.name for item in request.session.items):
        import ringfold.torch._build
        ringfold.torch._build.load()
