"""Alert rules and a scrape configuration, as YAML that means what was written."""

from __future__ import annotations

from pathlib import Path

import yaml

from kvferry.cli.boards.panels import ALERTS
from kvferry.cli.boards.rules import alert_rules, scrape_config


def test_every_alert_is_a_rule() -> None:
    [group] = yaml.safe_load(alert_rules())["groups"]
    assert [rule["alert"] for rule in group["rules"]] == [alert.name for alert in ALERTS]
    for rule, alert in zip(group["rules"], ALERTS, strict=True):
        assert rule["expr"] == alert.expression
        assert rule["annotations"]["remedy"] == alert.remedy


def test_a_router_is_scraped_with_all_its_instances() -> None:
    config = yaml.safe_load(scrape_config("https://[::1]:8000", interval_s=7))
    assert config["global"]["scrape_interval"] == "7s"
    [job] = config["scrape_configs"]
    assert (job["scheme"], job["params"], job["honor_labels"]) == ("https", {"instances": ["all"]}, True)
    assert job["static_configs"] == [{"targets": ["[::1]:8000"]}]
    assert "authorization" not in job
    assert "rule_files" not in config


def test_names_of_files_may_be_anything() -> None:
    odd = Path('/a b/"c": #d\n.yaml')
    config = yaml.safe_load(scrape_config("http://h:1", rules=odd, key_file=odd))
    assert config["rule_files"] == [str(odd)]
    assert config["scrape_configs"][0]["authorization"]["credentials_file"] == str(odd)
