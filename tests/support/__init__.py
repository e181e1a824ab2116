"""Tools of the tests: `ranks` runs a test function on several real ranks."""
