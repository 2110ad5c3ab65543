#!/usr/bin/env bash
# bash eval.sh                              the quickstart: nine configurations on the sample bench with the embedded model
# bash eval.sh preset=full                  the same with every method, cold and hot, on all questions
# bash eval.sh model=NAME bench=NAME ...    all of it on another model or bench, in a folder of its own
# bash eval.sh experiment=NAME [k=v ...]    an experiment of configs/experiment/, with changes
# bash eval.sh -m tree=best tree.nodes=8,24 any Hydra multirun
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
source tools/environment.sh
environment requirements.txt
case " $* " in
    *" experiment="* | *" -m "* | *" --multirun "* | *" --help "* | *" -h "* | *" --cfg "*) ;;
    *" name="*) set -- experiment=quickstart "$@" ;;
    *" model="* | *" model.path="* | *" model.name="* | *" bench="* | *" bench.path="* | *" bench.name="*)
        case " $* " in *" preset="*) ;; *) set -- preset=full "$@" ;; esac
        set -- experiment=quickstart 'name=quickstart-${subject}' "$@" ;; # apart from the shipped model's figures
    *) set -- experiment=quickstart "$@" ;;
esac
exec "$PYTHON" -m evaluation.run "$@"
