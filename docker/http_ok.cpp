// A health check for an image without a shell: http_ok PORT PATH [STORE] exits with 0 if http://127.0.0.1:PORT/PATH
// answers 200, and prints what was answered. A nats-server whose store once met a full disk tells of a write error until
// it is started anew: with STORE, its folder, process 1 is asked to end as soon as there is room; the engine starts it.
#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static bool has_room(const std::string& store) {
    const std::string path = store + "/.room";
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    const std::vector<char> data(1024 * 1024);
    const bool fits = file >= 0 && write(file, data.data(), data.size()) == static_cast<ssize_t>(data.size());
    if (file >= 0) {
        close(file);
    }
    unlink(path.c_str());
    return fits;
}

int main(int argc, char** argv) {
    if (argc != 3 && argc != 4) {
        std::fputs("usage: http_ok PORT PATH [STORE]\n", stderr);
        return 2;
    }
    sockaddr_in where{};
    where.sin_family = AF_INET;
    where.sin_port = htons(static_cast<uint16_t>(std::atoi(argv[1])));
    where.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int connection = socket(AF_INET, SOCK_STREAM, 0);
    const timeval limit{2, 0};
    setsockopt(connection, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    setsockopt(connection, SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
    if (connect(connection, reinterpret_cast<const sockaddr*>(&where), sizeof where) != 0) {
        std::perror("connect");
        return 1;
    }
    char request[512];
    const int length = std::snprintf(request, sizeof request, "GET %s HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n", argv[2]);
    if (length >= static_cast<int>(sizeof request) || write(connection, request, length) != length) {
        return 1;
    }
    char answer[4096] = {};
    size_t have = 0;
    while (have < sizeof answer - 1) {
        const ssize_t got = read(connection, answer + have, sizeof answer - 1 - have);
        if (got <= 0) {
            break;
        }
        have += static_cast<size_t>(got);
    }
    const char* const body = std::strstr(answer, "\r\n\r\n");
    std::printf("%.12s %s\n", answer, body != nullptr ? body + 4 : "");
    if (std::strncmp(answer, "HTTP/1.", 7) != 0) {
        return 1;
    }
    if (argc == 4 && std::strstr(answer, " write error: ") != nullptr && has_room(argv[3])) {
        std::puts("its store has failed and there is room: it is started anew");
        kill(1, SIGTERM);
    }
    return std::strncmp(answer + 8, " 200", 4) == 0 ? 0 : 1;
}
