"""Prints the admin ports of the running gateways, for Prometheus's file_sd_configs:

python deploy/ray/targets.py >new.json && mv new.json targets.json    # every minute, on any node
"""

from __future__ import annotations

import json

import ray
from ray import serve

APPLICATION = "dualgauge"


def main() -> None:
    ray.init("auto", log_to_driver=False)
    handle = serve.get_deployment_handle("gateway", APPLICATION)
    found = handle.broadcast("admin").results(timeout_s=10)
    print(json.dumps([{"targets": sorted(found), "labels": {"job": "dualgauge"}}]))


if __name__ == "__main__":
    main()
