"""`python -m runner` is `accel-run`."""

try:
    from runner.cli import main

    code = main()
except KeyboardInterrupt:  # before `main` could take the signal over
    code = 130
raise SystemExit(code)
