"""Is an engine, with its drafter, lossless? What it says is compared with what the model alone would say.

engines.py, peers.py, endpoint.py   the engine under test: ours, another library's, a server
reference.py                        the model alone, by transformers, without a cache
greedy.py, stops.py                 every token of greedy answers; where answers end
law.py, sampled.py                  the law of the first tokens of sampled answers
chance.py                           what counts prove, and which shift they would have shown
acceptance.py                       whether drafts are accepted as often as they should be
certificate.py                      all of it together
"""
