"""What a rank imports, as it does: for the server from which the ranks of tests are forked."""

from parallel.megatron_import import import_megatron

import_megatron()
