/* Runs one case: `faults NAME fault|twin`. 0: right, 1: wrong numbers, 2: no such case, 3: a report; sanitizers: 66. */
#include <cstdlib>
#include <cstring>
#include <string>

#include "cases.h"

std::vector<Case>& cases() {
    static std::vector<Case> all;
    return all;
}

int main(int argc, char** argv) {
    if (argc != 3) {
        for (const Case& one : cases()) printf("%s\n", one.name);
        return argc == 1 ? 0 : 2;
    }
    for (const Case& one : cases()) {
        if (std::strcmp(one.name, argv[1]) != 0) continue;
        std::string kernel = std::string(one.name) + "_" + argv[2];
        return one.run(kernel.c_str()) ? 0 : 1;
    }
    return 2;
}
