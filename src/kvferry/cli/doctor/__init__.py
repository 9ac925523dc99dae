"""`kvferry doctor`: `machine` looks at this machine, `deployment` at a running one, `medium` measures what a path
between two processes carries, `bundle` writes it all down for an issue."""
