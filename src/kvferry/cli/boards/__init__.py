"""Boards and alert rules for those who have Prometheus: `panels` says what is shown and alerted on, once; `grafana`,
`perses` and `rules` write it in the forms of these programs."""
