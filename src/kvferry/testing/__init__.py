"""What every implementation of an interface has to hold, as pytest classes to derive from. `kvferry[testing]`."""
