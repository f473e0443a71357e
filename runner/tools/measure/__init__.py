"""Measure which settings are faster: benchmark suites, tune and advise.

All of them compare variants of one training run by `Comparison.compare` and read a `TrialOutcome` for each:

comparing     compare (rounds, restarts, budget), comparison_result (results, outcomes, notes), statistics (ratios and
              intervals), selection (candidates, and the best of several, measured twice)
processes     fork_server (starts and stops variants), variant_process (the training in a variant), forked_ranks
              (variants with ranks), weight_sketch (compares weights)
suites        suites (declarations, and a module for each), suite (request, tables, JSON), measurement_context (plan and
              machine of a request), results and plots (of suite=ladder), technique (YAML files of the ladder),
              machine_rates
tune          tuner (search and proof), tune_axes (what may change)
advise        advisor, rules (evidence -> candidates), probe (inspects the code of a task), facts (and rules of thumb)
profiles      hardware_profile (writes the settings that tune has found)
"""
