"""Exits with 0 if the process of this container answers at PRELUDE_HEALTH_URL. For Docker; Kubernetes has probes."""

import os
import sys
import urllib.request

try:
    with urllib.request.urlopen(os.environ["PRELUDE_HEALTH_URL"], timeout=3) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(f"{os.environ['PRELUDE_HEALTH_URL']}: {error}")
