"""Commands that show what is running: `kvferry top`."""
