// The runner of every test program. A test that cannot run here calls ringfold::test::skip(reason)
// and returns; tools/test counts and lists those lines.
#define CATCH_CONFIG_MAIN
#include <catch2/catch.hpp>
