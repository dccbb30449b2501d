"""One of several processes with a cached client.

`python -m tests.kit.workers.http_asker STORE URL` says that it is ready, waits for a line, asks,
and says the body and where it came from.
"""

import sys

import requests

from stillfresh.integrations.requests import CacheAdapter, info_of

STORE, URL = sys.argv[1:3]

session = requests.Session()
session.mount("http://", CacheAdapter(STORE))
print("ready", flush=True)
sys.stdin.readline()
response = session.get(URL, timeout=20)
print(response.text, info_of(response).origin, flush=True)
session.close()
