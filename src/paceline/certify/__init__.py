"""Is an engine, with its drafter, lossless? Its answers are compared with those of the model alone.

options.py                     what is to be tested, and how closely
engines.py                     the engine under test: ours, or another library's
certificate.py                 what an endpoint is asked, part by part
oracles.py                     who judges what it says: its model's logits, or what servers report and a control
greedy.py                      every token of greedy answers; where answers end; how often drafts are accepted
sampled.py                     the distribution of the beginnings of sampled answers
conditional.py                 every token of long sampled answers
scenarios.py, shrink.py        situations in which engines break; the smallest requests that show it
stats.py, verdict.py, page.py  what counts prove; what is said of each test; as a page
requests.toml                  what is asked"""
