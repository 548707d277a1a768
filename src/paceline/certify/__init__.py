"""Is an engine, with its drafter, lossless? Its answers are compared with those of the model alone.

options.py                     what is to be tested, and how closely
engines.py, endpoint.py        the engine under test: ours, another library's, a server
reference.py                   the model alone, by transformers, and what rounding may make of it
greedy.py                      every token of greedy answers; where answers end
sampled.py                     the distribution of the first tokens of sampled answers
conditional.py                 every token of long sampled answers; by a server's log-probabilities
stats.py                       what counts prove: chi-square tests and their power
verdict.py                     what is said of each test, whoever was tested
certificate.py, page.py        all of it together, and whether drafts are accepted as they should be; as a page
requests.toml                  what is asked"""
