"""Is an engine, with its drafter, lossless? Its answers are compared with those of the model alone.

options.py                     what is to be tested, and how closely
engines.py                     the engine under test: ours, or another library's
certificate.py                 what an endpoint is asked, part by part
oracles.py                     two judges: its model's logits, or reported log-probabilities and a control
greedy.py                      every token of greedy answers; where answers end; how often drafts are accepted
sampled.py                     the distribution of the beginnings of sampled answers
conditional.py                 every token of long sampled answers
scenarios.py, shrink.py        situations in which engines break; the smallest requests that show a bug
stats.py, verdict.py, page.py  tests of counts; facts and verdict; the page
requests.toml                  prompts, features and ways to sample"""
