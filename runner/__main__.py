"""`python -m runner` is `accel-run`."""

try:
    from runner.cli import main

    code = main()
except KeyboardInterrupt:  # before `main` installs its signal handlers
    code = 130
raise SystemExit(code)
