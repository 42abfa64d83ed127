"""Nothing may hang: a test that takes too long ends the run, with the stacks of its threads."""
import faulthandler
import os

import pytest

LIMIT = 60  # seconds for one test


@pytest.fixture(autouse=True)
def limit(request):
    seconds = LIMIT if request.path.name == "ringfold_test.py" else 10 * LIMIT  # torch loads slowly
    factor = float(os.environ.get("TEST_TIMEOUT_FACTOR", "1"))
    faulthandler.dump_traceback_later(seconds * factor, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
