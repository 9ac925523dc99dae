"""`kvferry doctor`: `machine` examines this machine; `deployment` examines a running deployment, and measures the rate
between two processes; `command` shows the findings, and writes them to a file for an issue."""
