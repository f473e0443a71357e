"""`python -m runner` is `accel-run`."""

from runner.cli import main

raise SystemExit(main())
