"""`kvferry doctor`: `machine` looks at this machine, `deployment` at a running one and at what a path between two
processes carries; `command` shows it, and writes it all down for an issue."""
