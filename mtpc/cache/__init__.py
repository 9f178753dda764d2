"""The ahead-of-time cache of compiled steps: what was built once is loaded, checked, and bound."""
