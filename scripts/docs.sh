#!/usr/bin/env bash
# Build the documentation site in build/site, and check its links and anchors. A warning is an error.
#
#   scripts/docs.sh              build/site/index.html is the first page
#   scripts/docs.sh serve        serve the site on http://127.0.0.1:8000
#
# The pages keep their relative paths, so that links work both in the repository and on the site. The
# navigation is the table in docs/README.md.
set -euo pipefail
# shellcheck source=scripts/setup.sh
source "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/setup.sh"
set_up --quiet docs
cd -- "$root"

pages=build/docs
rm -rf -- "$pages"
git ls-files -z -- ':(glob)*.md' docs LICENSE 'tests/*.md' | xargs -0 cp --parents -t "$(mkdir -p -- "$pages" && printf '%s' "$pages")"
find "$pages" -name '*.md' -exec sed -i -E 's/^( *```text) [a-z]+$/\1/' {} + # only tests use the word after `text`

# A link to a folder leads to the list of its pages.
for folder in docs/decisions docs/results; do
    {
        printf '# %s\n\n' "$(basename "$folder" | sed 's/./\U&/')"
        for page in "$folder"/*.md; do
            printf -- '- [%s](%s)\n' "$(sed -n '1s/^# //p' "$page")" "$(basename "$page")"
        done
    } >"$pages/$folder/README.md"
done

{
    printf 'INHERIT: ../docs/mkdocs.yml\ndocs_dir: docs\nsite_dir: site\nnav:\n  - README.md\n  - docs/README.md\n'
    awk -F'[][()|*]' '
        /^\| \*\*/ { sub(/^\| \*\*/, ""); sub(/\*\*.*/, ""); print "  - " $0 ":" }
        /^\| \[/ { match($0, /\]\([^)]*\)/); print "      - docs/" substr($0, RSTART + 2, RLENGTH - 3) }
    ' docs/README.md
    printf '  - %s:\n      - docs/design.md\n      - docs/one-update.md\n      - CONTRIBUTING.md\n' "Contribute"
    printf '      - docs/decisions/README.md\n      - docs/results/README.md\n'
} >build/mkdocs.yml

if [[ ${1:-} == serve ]]; then
    exec "$venv/bin/python" -m mkdocs serve --config-file build/mkdocs.yml --dev-addr 127.0.0.1:8000
fi
NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs build --strict --config-file build/mkdocs.yml
printf 'docs: %s pages in build/site\n' "$(find build/site -name index.html | wc -l)"
