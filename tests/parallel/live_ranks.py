"""Live ranks for the tests of this folder, guarded: a false alarm fails a test. ``conftest.py`` ends them."""
import dtlab


def pool(num_ranks):
    """So many ranks: those that live, or new ones in their place."""
    live = dtlab.current_ranks()
    return live if live is not None and live.size == num_ranks else dtlab.launch(num_ranks)
