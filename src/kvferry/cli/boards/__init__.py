"""Dashboards and alert rules for Prometheus. `panels` has the charts and alerts; `grafana`, `perses` and `rules` write
them in the formats of these programs."""
