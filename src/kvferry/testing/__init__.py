"""Contract suites for every implementation of an interface, as pytest classes to derive from. `kvferry[testing]`."""
