// Functions of NVIDIA's libraries whose results torch uses; stubs.py adds all others that torch calls.

static char handle[4096];

int cublasCreate_v2(void **made) { return *made = handle, 0; }
int cublasLtCreate(void **made) { return *made = handle, 0; }
int cudnnCreate(void **made) { return *made = handle, 0; }
int cusolverDnCreate(void **made) { return *made = handle, 0; }
int cusparseCreate(void **made) { return *made = handle, 0; }
int cublasLtMatmulAlgoGetHeuristic(
    void *a, void *b, void *c, void *d, void *e, void *f, void *g, int wanted, void *found, int *count) {
  return *count = 1, 0;
}
const char *cudnnGetErrorString(int error) { return "none"; }
const char *ncclGetErrorString(int error) { return "none"; }
int cudnnGetProperty(int which, int *value) { return *value = which == 0 ? 9 : which == 1 ? 24 : 0, 0; }
unsigned long cudnnGetVersion(void) { return 92400; }
unsigned long cublasLtGetVersion(void) { return 130100; }
int ncclCommGetAsyncError(void *communicator, int *state) { return *state = 0, 0; }
int ncclGetVersion(int *version) { return *version = 23007, 0; }
