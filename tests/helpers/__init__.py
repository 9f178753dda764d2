"""Shared parts of the tests: tiny models, oracles, cases, hosts and servers. It has no tests."""
